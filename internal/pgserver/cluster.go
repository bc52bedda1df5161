// A server's database cluster and its configuration.

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

const (
	defaultPort  = 5432 // names the socket; every server has a directory of its own for it
	portAttempts = 5
)

// makeCluster makes or copies the cluster.
func (s *Server) makeCluster(ctx context.Context) error {
	var err error
	switch {
	case s.cfg.Clusters != nil:
		err = s.cfg.Clusters.copyTo(ctx, s)
	case os.Getenv(ClustersEnv) != "":
		err = new(Clusters).copyTo(ctx, s)
	default:
		err = s.initdb(ctx)
	}
	if err == nil && s.cfg.Network != nil {
		err = s.admitNeighbours()
	}
	return err
}

// initdb makes the cluster.
func (s *Server) initdb(ctx context.Context) error {
	password := filepath.Join(s.dir.path, "password")
	if err := os.WriteFile(password, []byte(s.password+"\n"), 0o600); err != nil {
		return err
	}
	if err := s.as.own(password); err != nil {
		return err
	}
	args := append([]string{
		"--pgdata", s.dir.data(), "--username", Superuser, "--pwfile", password,
		"--encoding=UTF8", "--locale=C", "--no-sync",
		// The socket is in a closed directory; any user of the machine reaches TCP.
		"--auth-local=trust", "--auth-host=scram-sha-256",
	}, s.cfg.InitdbArgs...)
	err := run(ctx, s.dir.data(), s.as, s.cfg.Binaries.tool("initdb"), args...)
	return errors.Join(err, os.Remove(password))
}

// admitNeighbours lets clients in that are not on the server's own address, which
// initdb does not.
func (s *Server) admitNeighbours() error {
	hba, err := os.OpenFile(filepath.Join(s.dir.data(), "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = hba.WriteString("host all all samenet scram-sha-256\n")
	return errors.Join(err, hba.Close())
}

// firstStart starts the server of a new cluster. Between our finding a free
// port and the server's taking it, another program may take it: then we try
// the next one.
func (s *Server) firstStart(ctx context.Context) error {
	for attempt := 1; ; attempt++ {
		if err := s.choosePort(); err != nil {
			return err
		}
		if err := s.configure(); err != nil {
			return err
		}
		err := s.launch(ctx)
		if err == nil || attempt == portAttempts || !s.portTaken() {
			return err
		}
	}
}

func (s *Server) choosePort() error {
	s.port = defaultPort
	if !s.sharesPorts() {
		return nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.port = l.Addr().(*net.TCPAddr).Port
	return l.Close()
}

// portTaken says whether another program listens on our port.
func (s *Server) portTaken() bool {
	if !s.sharesPorts() {
		return false
	}
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)))
	if err == nil {
		_ = l.Close()
	}
	return errors.Is(err, syscall.EADDRINUSE)
}

// configure writes the server's configuration. It is a file, not arguments, so
// that ALTER SYSTEM can change every setting, and it is outside the data
// directory, so that a standby does not get its primary's.
func (s *Server) configure() error {
	settings := map[string]string{
		"listen_addresses":        s.address(),
		"port":                    strconv.Itoa(s.port),
		"unix_socket_directories": s.dir.socket(),
		// The same everywhere, where initdb would ask the machine.
		"shared_buffers": "128MB",
		"timezone":       "UTC",
		"log_timezone":   "UTC",
		"lc_messages":    "C",
		// In the data directory, which is removed with a server that was killed.
		"dynamic_shared_memory_type": "mmap",
		// For Standby.
		"wal_level":       "replica",
		"max_wal_senders": "10",
		"hot_standby":     "on",
	}
	if os.Getenv(CountsEnv) != "" {
		settings["log_connections"] = "on"
	}
	maps.Copy(settings, s.cfg.Settings)
	var text strings.Builder
	quote := strings.NewReplacer(`\`, `\\`, `'`, `''`)
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&text, "%s = '%s'\n", name, quote.Replace(settings[name]))
	}
	if err := os.WriteFile(s.dir.config(), []byte(text.String()), 0o600); err != nil {
		return err
	}
	return s.as.own(s.dir.config())
}
