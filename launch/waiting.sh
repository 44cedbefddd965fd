# Shows what a script waits for, so that it is never silent: on a terminal one line with the seconds, drawn again every
# second; elsewhere a line every 10 seconds. For scripts to source.

# The text of the line, for WHAT of `waiting`; a script may add to it.
describe_wait() { echo "$1"; }

# usage: waiting WHAT COMMAND...: runs the command, here and with the script's signals, and returns its status.
waiting() {
    local status=0 ticker
    show_wait "$1" &
    ticker=$!
    disown "$ticker"  # else bash reports its end
    "${@:2}" || status=$?
    kill "$ticker" 2>/dev/null || true
    [[ ! -t 1 ]] || printf '\r\e[2K'
    return "$status"
}

show_wait() {
    local started=$SECONDS last=$SECONDS text
    # Until the script has ended, whether its parent has noticed or not.
    while sleep 1 &>/dev/null && grep -qs '^State:.*[^Z] (' "/proc/$$/status"; do
        text="$(describe_wait "$1"), $((SECONDS - started)) s"
        if [[ -t 1 ]]; then
            printf '\r\e[2K%s\r' "${text:0:${COLUMNS:-80}}"  # at the line's start, where the command may print
        elif ((SECONDS - last >= 10)); then
            echo "$(date +%T)  $text"
            last=$SECONDS
        fi
    done
}

# usage: remember COMMAND...: the command that a user entered, which the last line of a run that has not finished repeats.
remember() {
    [[ -n ${MEGAPPO_COMMAND:-} ]] || MEGAPPO_COMMAND=$(printf '%q ' "$@")
    export MEGAPPO_COMMAND=${MEGAPPO_COMMAND% }
}
