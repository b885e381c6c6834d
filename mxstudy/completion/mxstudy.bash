# Tab completion of mxstudy in bash, also as python -m mxstudy: source <(mxstudy completion bash)

_mxstudy() {
  local words found word before one first=1
  read -r -a words <<< "${COMP_LINE:0:COMP_POINT}"
  [[ ${COMP_LINE:0:COMP_POINT} == *[[:space:]] ]] && words+=("")
  local command=("${words[0]/#\~/$HOME}")
  [[ ${words[*]:1:2} == "-m mxstudy" ]] && command+=(-m mxstudy) first=3
  mapfile -t found < <("${command[@]}" completion -- "${words[@]:first}" 2> /dev/null)
  # Readline replaces what stands behind the last = or :, if these break words, which is the default.
  word=${words[-1]}
  [[ $COMP_WORDBREAKS == *=* ]] && before=${word%"${word##*[=:]}"}
  COMPREPLY=()
  for one in "${found[@]}"; do
    [[ $one == *[=.] ]] || one+=" "
    COMPREPLY+=("${one#"$before"}")
  done
  compopt -o nospace
}

_mxstudy_python() {
  if [[ ${COMP_LINE:0:COMP_POINT} =~ ^[^[:space:]]+[[:space:]]+-m[[:space:]]+mxstudy[[:space:]] ]]; then
    _mxstudy
  elif [[ $_mxstudy_else ]]; then
    "$_mxstudy_else" "$@"
  fi
}

# What completes python so far goes on completing all other commands of python.
if declare -F _comp_load > /dev/null; then
  _comp_load python
elif declare -F _completion_loader > /dev/null; then
  _completion_loader python
fi
if [[ $(complete -p python 2> /dev/null) =~ \ -F\ ([^ ]+) && ${BASH_REMATCH[1]} != _mxstudy_python ]]; then
  _mxstudy_else=${BASH_REMATCH[1]}
fi
complete -o default -F _mxstudy mxstudy
complete -o default -F _mxstudy_python python python3
