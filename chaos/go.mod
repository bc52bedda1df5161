module github.com/pgxlock/pgxlock/chaos

go 1.26.0

replace github.com/pgxlock/pgxlock => ../

require golang.org/x/sys v0.47.0

require github.com/anishathalye/porcupine v1.3.1
