// Package choose decides which PostgreSQL server the tests use, for all of them
// in the same way: the one that PGXLOCK_TEST_DATABASE names; else one of the
// binaries that PGXLOCK_TEST_BINDIR names; else a container, if a Docker engine
// answers and has the image or gets it soon; else the binaries of this machine.
// There is no other way, and none of skipping.
//
// DATABASE_URL and the variables that begin with PG are never looked at: they
// may name a production server, and tests create and drop databases.
package choose

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// The environment variables of the tests.
const (
	DatabaseEnv = "PGXLOCK_TEST_DATABASE" // connection string of a role that may create databases
	ServerEnv   = "PGXLOCK_TEST_SERVER"   // what to call that server in messages; with sets it
	VerboseEnv  = "PGXLOCK_TEST_VERBOSE"  // not empty: say as well why no better server was chosen
)

// ErrNoServer means that there is no server to be had. The error that wraps it
// says why for each way, and what to do.
var ErrNoServer = errors.New("no PostgreSQL server for the tests")

// remedy is what to do about ErrNoServer, the easiest first.
const remedy = "run scripts/install-postgres (as root, on Debian), or install your system's PostgreSQL server package, or start Docker, or set " +
	DatabaseEnv + " to the connection string of a role that may create databases"

// Server is the chosen server.
type Server struct {
	URL         string   // connection string of a role that may create databases
	Description string   // what it is, for people
	PassedOver  []string // the better ways that could not be taken, and why
	stop        func(context.Context) error
}

// String says in one line which server is used, and if VerboseEnv is set why not a better one:
// that reads like a failure, and there is none.
func (s *Server) String() string {
	line := s.Description
	if len(s.PassedOver) > 0 && os.Getenv(VerboseEnv) != "" {
		line += " (not " + strings.Join(s.PassedOver, "; not ") + ")"
	}
	return line
}

// Stop stops the server and removes all that is left of it, if Start started it.
func (s *Server) Stop(ctx context.Context) error { return s.stop(ctx) }

// Settings are the settings of servers that are started for tests. Their data
// need not survive the machine, so they do not wait for its disk; all else is
// as in production.
func Settings() map[string]string {
	return map[string]string{"fsync": "off", "max_connections": "300"}
}

// way is one way to get a server. Its error begins with what it tried.
type way func(context.Context) (*Server, error)

// Start chooses a server, and starts it if it does not run already. The PG
// variables are gone from the process's environment after that: pgx would mix
// PGSERVICE, PGOPTIONS and the like into the connections of the tests.
func Start(ctx context.Context) (*Server, error) {
	if err := forgetLibpq(); err != nil {
		return nil, err
	}
	if url := os.Getenv(DatabaseEnv); url != "" {
		return named(ctx, url)
	}
	if os.Getenv(pgserver.BinDirEnv) != "" {
		return first(ctx, []way{startLocal})
	}
	return first(ctx, []way{startContainer, startLocal})
}

func forgetLibpq() error {
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "PG") && !strings.HasPrefix(name, "PGXLOCK_") {
			if err := os.Unsetenv(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// named uses the server that the environment names. If that one does not
// answer, another is not what was asked for.
func named(ctx context.Context, url string) (*Server, error) {
	conn, err := pgconn.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("%w: %s is set, but %w", ErrNoServer, DatabaseEnv, err)
	}
	version := conn.ParameterStatus("server_version")
	if err := conn.Close(ctx); err != nil {
		return nil, fmt.Errorf("%w: %s is set, but %w", ErrNoServer, DatabaseEnv, err)
	}
	description := os.Getenv(ServerEnv)
	if description == "" {
		description = fmt.Sprintf("PostgreSQL %s, from %s", version, DatabaseEnv)
	}
	return &Server{
		URL:         url,
		Description: description,
		stop:        func(context.Context) error { return nil }, // not ours
	}, nil
}

// first takes the first way that works.
func first(ctx context.Context, ways []way) (*Server, error) {
	var (
		errs   []error
		passed []string
	)
	for _, start := range ways {
		server, err := start(ctx)
		if err == nil {
			server.PassedOver = passed
			return server, nil
		}
		errs = append(errs, err)
		passed = append(passed, oneLine(err))
	}
	return nil, fmt.Errorf("%w; %s\n%w", ErrNoServer, remedy, errors.Join(errs...))
}

// oneLine keeps the first line of an error's text.
func oneLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
