// A Balancer is a Pgpool-II in front of a primary and a standby.

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
)

// BalancerEnv names the program of Pgpool-II.
const BalancerEnv = "PGXLOCK_TEST_PGPOOL"

// ErrNoBalancer means that this machine has no Pgpool-II.
var ErrNoBalancer = errors.New("no Pgpool-II: " + BalancerEnv + " does not name it, and PATH has none; scripts/pgpool-tree gets it from Debian's packages")

// FindBalancer returns the program of Pgpool-II that BalancerEnv names, else the one that is
// installed.
func FindBalancer() (string, error) {
	if path := os.Getenv(BalancerEnv); path != "" {
		return path, nil
	}
	for _, name := range []string{"pgpool", "/usr/sbin/pgpool"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", ErrNoBalancer
}

// Balancer is a Pgpool-II that runs in front of a primary and a standby.
type Balancer struct{ *Companion }

// Balancer starts a Pgpool-II in front of the server and its standby, on a socket. What it may
// send to a standby goes to this one. It is to be stopped before the two. settings come on top.
func (s *Server) Balancer(ctx context.Context, program string, standby *Server, settings map[string]string) (*Balancer, error) {
	c, err := s.newCompanion()
	if err != nil {
		return nil, fmt.Errorf("pgserver: balancer: %w", err)
	}
	c.quit = syscall.SIGINT // SIGTERM waits for its clients
	b := &Balancer{c}
	if err := b.configure(standby, settings); err != nil {
		return nil, fmt.Errorf("pgserver: balancer: %w", errors.Join(err, b.Stop(ctx)))
	}
	if err := b.start(ctx, b.answers, program, "-n", "-f", b.file("pgpool.conf"), "-F", b.file("pcp.conf")); err != nil {
		return nil, fmt.Errorf("pgserver: balancer: %w", err)
	}
	return b, nil
}

// configure writes the files that Pgpool-II reads.
func (b *Balancer) configure(standby *Server, settings map[string]string) error {
	all := map[string]string{
		"backend_clustering_mode": "streaming_replication", "load_balance_mode": "on",
		"socket_dir": b.dir, "pcp_socket_dir": b.dir, "work_dir": b.dir, "logdir": b.dir, "pid_file_name": b.file("pid"),
		"listen_addresses": "", "pcp_listen_addresses": "", "port": strconv.Itoa(defaultPort), "pcp_port": strconv.Itoa(defaultPort + 1),
		"num_init_children": "32", "max_pool": "1", "sr_check_user": Superuser,
	}
	for i, server := range []*Server{b.server, standby} {
		all[fmt.Sprint("backend_hostname", i)] = server.dir.socket()
		all[fmt.Sprint("backend_port", i)] = strconv.Itoa(server.port)
		all[fmt.Sprint("backend_weight", i)] = strconv.Itoa(i) // all to the standby
		all[fmt.Sprint("backend_flag", i)] = "DISALLOW_TO_FAILOVER"
	}
	maps.Copy(all, settings)
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&text, "%s = '%s'\n", name, all[name])
	}
	return errors.Join(b.write("pgpool.conf", text.String()), b.write("pcp.conf", ""))
}

// answers says whether it leads to both servers: without the standby it would balance nothing.
func (b *Balancer) answers(ctx context.Context) error {
	conn, err := pgconn.Connect(ctx, b.URL("postgres"))
	if err != nil {
		return err
	}
	shown, err := conn.Exec(ctx, "show transaction_read_only").ReadAll()
	if err == nil && string(shown[0].Rows[0][0]) != "on" {
		err = errors.New("it does not use the standby")
	}
	return errors.Join(err, conn.Close(ctx))
}

// URL returns a connection string for a database of the servers, through the balancer.
func (b *Balancer) URL(database string) string { return socketURL(b.dir, defaultPort, database) }
