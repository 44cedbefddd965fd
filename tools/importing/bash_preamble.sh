# Read by every bash of an import before its script: what the script calls is recorded, and does not run.
exec {BASH_XTRACEFD}>/dev/null
set -u
if ((IMPORT_STATUS)); then  # a command that is not run fails, but ends nothing
    set -T
    trap 'set +e' DEBUG
fi

command_not_found_handle() {
    local number line=0
    case $1 in *.sh) if [[ -f $1 ]]; then bash "$@"; return; fi ;; esac
    for ((number = 2; number <= $#; number++)); do  # a launcher starts the shell behind it
        case ${!number##*/} in bash | sh) bash "${@:number+1}"; return ;; esac
    done
    for ((number = 1; number < ${#BASH_SOURCE[@]}; number++)); do
        [[ ${BASH_SOURCE[number]} == "$BASH_ENV" ]] || { line=${BASH_LINENO[number - 1]}; break; }
    done
    printf '%s\0' "$#" "$line" "$@" >&"$IMPORT_RECORD"
    if [[ -p /dev/stdout ]]; then printf '$(%s)\n' "${1##*/}"; fi
    return "$IMPORT_STATUS"
}

tool() {  # the output of a command that is not run passes through unchanged
    local text status=0
    if [[ -p /dev/stdin ]]; then
        text=$(command cat; printf .)
        text=${text%.}
        if [[ $text == *'$('* ]]; then printf '%s' "$text"; return "$IMPORT_STATUS"; fi
        printf '%s' "$text" | command "$@" || status=$?
    else
        command "$@" || status=$?
    fi
    case $status:$1 in
        0:*) ;;
        1:grep | 1:expr) return 1 ;;
        *) command_not_found_handle "$@" ;;
    esac
}
for name in $IMPORT_TOOLS; do eval "$name() { tool $name \"\$@\"; }"; done
for name in $IMPORT_COMMANDS; do eval "function $name { command_not_found_handle $name \"\$@\"; }"; done

date() { command date -d "@$IMPORT_TIME" "$@"; }
mkdir() { command mkdir "$@" 2>/dev/null || true; }
tee() { command tee "$@" 2>/dev/null || true; }
pwd() { printf '%s\n' "$PWD"; }
cd() {  # also into the folders of another machine
    local to=$HOME
    (($#)) && to=${!#}
    builtin cd -- "$to" 2>/dev/null && return
    OLDPWD=$PWD
    case $to in /* | '~'* | '$'*) PWD=$to ;; *) PWD=$PWD/$to ;; esac
}
pushd() { cd "$@"; }
popd() { :; }
source() { if [[ -f $1 && -r $1 ]]; then builtin source "$@"; else command_not_found_handle source "$@"; fi; }
.() { source "$@"; }
sh() { bash "$@"; }
exec() { if (($#)); then "$@"; exit; fi; }
ulimit() { :; }
kill() { :; }
python() {
    if [[ ${1-} == -c && $2 != *print* ]]; then
        command "$IMPORT_PYTHON" -ISc "${@:2}"
    elif [[ ${1-} != -c ]] || ! command "$IMPORT_PYTHON" -ISc "${@:2}" 2>/dev/null; then
        command_not_found_handle python3 "$@"
    fi
}
python3() { python "$@"; }
