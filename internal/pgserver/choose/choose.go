// Package choose decides which PostgreSQL server the tests use, for all of them
// in the same way: the one that PGXLOCK_TEST_DATABASE names; else one of the
// binaries that PGXLOCK_TEST_BINDIR names; else one by the ways that the caller
// adds, such as a container, in their order; else the binaries of this machine.
// There is no other way, and none of skipping.
//
// A way that needs more than pgx is in a module of its own, so that no test
// links it: internal/containers has a program that adds its way.
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

	// ContainerEnv is "1" where with started that server in a container, and "0" where with
	// was to do so and this machine has no engine or no image.
	ContainerEnv = "PGXLOCK_TEST_CONTAINER"
)

// ErrNoServer means that there is no server to be had. The error that wraps it
// says why for each way, and what to do.
var ErrNoServer = errors.New("no PostgreSQL server for the tests")

// remedy is what to do about ErrNoServer, the easiest first.
const remedy = "Run make test, which installs one as root on Debian; or install your system's PostgreSQL server package, or start Docker for make test, or set " +
	DatabaseEnv + " to the connection string of a role that may create databases."

// Server is the chosen server.
type Server struct {
	URL         string   // connection string of a role that may create databases
	Description string   // what it is, for people
	Container   bool     // it runs in a container
	PassedOver  []string // the better ways that could not be taken, and why
	stop        func(context.Context) error
}

// NewServer returns the server that a Way has started. stop stops it and removes all that is
// left of it.
func NewServer(url, description string, stop func(context.Context) error) *Server {
	return &Server{URL: url, Description: description, stop: stop}
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

// A Way is one way to get a server. Its error begins with what it tried.
type Way func(context.Context) (*Server, error)

// Absent marks the error of a Way on a machine that lacks what the way needs.
func Absent(err error) error { return &absence{err} }

type absence struct{ error }

func (a *absence) Unwrap() error { return a.error }

// Required returns the way as one that is passed over only on a machine that lacks what it
// needs: any other failure is final.
func Required(w Way) Way {
	return func(ctx context.Context) (*Server, error) {
		server, err := w(ctx)
		if _, absent := errors.AsType[*absence](err); err != nil && !absent {
			err = &finality{err}
		}
		return server, err
	}
}

type finality struct{ error }

func (f *finality) Unwrap() error { return f.error }

// Start chooses a server, and starts it if it does not run already. more are ways to try
// before the binaries of this machine, where no variable names a server or binaries. The PG
// variables are gone from the process's environment after that: pgx would mix
// PGSERVICE, PGOPTIONS and the like into the connections of the tests.
func Start(ctx context.Context, more ...Way) (*Server, error) {
	if err := forgetLibpq(); err != nil {
		return nil, err
	}
	if url := os.Getenv(DatabaseEnv); url != "" {
		return named(ctx, url)
	}
	if os.Getenv(pgserver.BinDirEnv) != "" {
		return first(ctx, local)
	}
	return first(ctx, append(more[:len(more):len(more)], local)...)
}

// local starts a server of the binaries of this machine.
func local(ctx context.Context) (*Server, error) {
	s, err := pgserver.Start(ctx, pgserver.Config{Settings: Settings()})
	if err != nil {
		return nil, err
	}
	return NewServer(s.URL("postgres"), s.Description(), s.Stop), nil
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
	return NewServer(url, description, func(context.Context) error { return nil }), nil // not ours to stop
}

// first takes the first way that works.
func first(ctx context.Context, ways ...Way) (*Server, error) {
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
		if _, final := errors.AsType[*finality](err); final {
			return nil, fmt.Errorf("%w\n%w", ErrNoServer, err)
		}
		errs = append(errs, err)
		passed = append(passed, oneLine(err))
	}
	return nil, fmt.Errorf("%w\n%w\n%s", ErrNoServer, errors.Join(errs...), remedy)
}

// oneLine keeps the first line of an error's text.
func oneLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
