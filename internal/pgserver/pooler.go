// A Pooler is a PgBouncer in front of a server.

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
)

// PoolerEnv names programs of PgBouncer, separated as in PATH.
const PoolerEnv = "PGXLOCK_TEST_PGBOUNCER"

// ErrNoPooler means that this machine has no PgBouncer.
var ErrNoPooler = errors.New("no PgBouncer: " + PoolerEnv + " names none, and PATH has none; scripts/pgbouncer-tree gets it from Debian's packages")

// FindPoolers returns the programs of PgBouncer that PoolerEnv names, else the
// one that is installed.
func FindPoolers() ([]string, error) {
	if list := filepath.SplitList(os.Getenv(PoolerEnv)); len(list) > 0 {
		return list, nil
	}
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} {
		if path, err := exec.LookPath(name); err == nil {
			return []string{path}, nil
		}
	}
	return nil, ErrNoPooler
}

// Pooler is a PgBouncer that runs in front of a server.
type Pooler struct {
	*Companion
	Version string // such as "1.24.1"

	settings map[string]string
}

// Pooler starts a PgBouncer in front of the server, on a socket. It is to be
// stopped before the server. settings come on top of a pool of two connections
// for each database.
func (s *Server) Pooler(ctx context.Context, program string, settings map[string]string) (*Pooler, error) {
	c, err := s.newCompanion()
	if err != nil {
		return nil, fmt.Errorf("pgserver: pooler: %w", err)
	}
	p := &Pooler{Companion: c}
	if output, err := exec.CommandContext(ctx, program, "--version").Output(); err == nil {
		_, _ = fmt.Sscanf(string(output), "PgBouncer %s", &p.Version)
	}
	if err := p.configure(settings); err != nil {
		return nil, fmt.Errorf("pgserver: pooler: %w", errors.Join(err, p.Stop(ctx)))
	}
	if err := p.start(ctx, p.answers, program, p.file("pgbouncer.ini")); err != nil {
		return nil, fmt.Errorf("pgserver: pooler: %w", err)
	}
	return p, nil
}

// configure writes the files that the pooler reads.
func (p *Pooler) configure(settings map[string]string) error {
	p.settings = map[string]string{
		"unix_socket_dir": p.dir, "listen_port": strconv.Itoa(defaultPort), "listen_addr": "",
		"auth_type": "trust", "auth_file": p.file("users"),
		"default_pool_size": "2", "max_client_conn": "500", "admin_users": Superuser,
		"ignore_startup_parameters": "extra_float_digits",
	}
	maps.Copy(p.settings, settings)
	return errors.Join(p.lead(p.server), p.write("users", fmt.Sprintf("%q \"\"\n", Superuser)))
}

// lead writes the configuration, which leads to the server.
func (p *Pooler) lead(server *Server) error {
	var text strings.Builder
	fmt.Fprintf(&text, "[databases]\n* = host=%s port=%d\n\n[pgbouncer]\n", server.dir.socket(), server.port)
	for _, name := range slices.Sorted(maps.Keys(p.settings)) {
		fmt.Fprintf(&text, "%s = %s\n", name, p.settings[name])
	}
	return p.write("pgbouncer.ini", text.String())
}

// Redirect makes the pooler lead to another server, as after a failover. Clients
// keep their connections; it is done when the pooler comes to it.
func (p *Pooler) Redirect(server *Server) error {
	if err := p.lead(server); err != nil {
		return fmt.Errorf("pgserver: redirect the pooler: %w", err)
	}
	return p.process.signal(syscall.SIGHUP)
}

// answers says whether the pooler leads to the server.
func (p *Pooler) answers(ctx context.Context) error {
	conn, err := pgconn.Connect(ctx, p.URL("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// URL returns a connection string for a database of the server, through the
// pooler.
func (p *Pooler) URL(database string) string { return socketURL(p.dir, defaultPort, database) }
