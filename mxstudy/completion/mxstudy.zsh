# Tab completion of mxstudy in zsh, also as python -m mxstudy: source <(mxstudy completion zsh)

_mxstudy() {
  local -a command=(${~words[1]}) typed found
  local first=2
  [[ "${words[2,3]}" == "-m mxstudy" ]] && command+=(-m mxstudy) first=4
  typed=("${(@)words[first,CURRENT-1]}" "$PREFIX")
  found=(${(f)"$($command completion -- "${(@)typed}" 2> /dev/null)"})
  if (( $#found )); then
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
  else
    compset -P '*='
    _files
  fi
}

_mxstudy_python() {
  if (( CURRENT > 3 )) && [[ "${words[2,3]}" == "-m mxstudy" ]]; then
    _mxstudy
  else
    _python
  fi
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _mxstudy mxstudy
compdef _mxstudy_python python python3
