// With runs a command with a PostgreSQL server of this machine for its tests: see package
// withserver. The program of the same name in internal/containers starts containers as well.
package main

import "github.com/pgxlock/pgxlock/internal/pgserver/withserver"

func main() { withserver.Main() }
