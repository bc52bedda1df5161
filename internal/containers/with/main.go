// With runs a command with a PostgreSQL server for its tests: one in a container where a Docker
// engine answers and has the image or gets it soon. See package withserver.
package main

import (
	"github.com/pgxlock/pgxlock/internal/containers"
	"github.com/pgxlock/pgxlock/internal/pgserver/withserver"
)

func main() { withserver.Main(containers.Way) }
