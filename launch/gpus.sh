# How many GPUs a script's processes would use. For scripts to source.

# As visible_devices of megappo/runtime/machine.py.
num_gpus() {
    if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
        { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
        return
    fi
    local devices device count=0
    IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES//[[:space:]]/}"
    for device in "${devices[@]}"; do
        [[ $device =~ ^([0-9]+|(GPU|MIG)-.+)$ ]] || break
        count=$((count + 1))
        [[ $device != MIG-* ]] || break
    done
    echo "$count"
}
