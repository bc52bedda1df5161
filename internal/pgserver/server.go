// A Server starts, is promoted and demoted, and stops.

package pgserver

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Superuser is the role that owns the server and that URL connects as.
const Superuser = "postgres"

// pollInterval is how often we look whether a server has become what we wait for.
const pollInterval = 10 * time.Millisecond

// Config says what server to start. The zero value is a server as PostgreSQL's
// defaults have it, on a socket only.
type Config struct {
	Binaries   Binaries          // which PostgreSQL; the zero value asks Find
	Settings   map[string]string // server settings
	Env        []string          // more environment variables, as NAME=value
	OnDisk     bool              // keep the data on a disk, where memory has room for them too
	InitdbArgs []string          // more arguments for initdb
	Clusters   *Clusters         // copies the cluster; if nil initdb makes one, where ClustersEnv names none to copy
	TCP        bool              // also listen on a free port of 127.0.0.1, with a password
	Network    *Network          // also listen in another network, with a password; TCP is not looked at
	Log        io.Writer         // gets the server's log as well, if not nil
}

// Network is where a server listens that is not to be in this machine's network,
// such as a namespace of Linux. Its socket is reached from here all the same.
type Network struct {
	Address string       // the server's own
	Enter   func() error // takes the thread that calls it there, for good
}

// Server is a running PostgreSQL, or one that was stopped by Crash or Kill and
// can be started again.
type Server struct {
	cfg      Config
	as       *account
	dir      *directory
	port     int
	password string
	log      *tail

	mu      sync.Mutex // held by what changes the fields below
	process *process
	counted bool // reported by the first Stop
}

// Start makes a new database cluster and starts a server on it. It returns when
// the server accepts connections. The server lives until Stop, or until this
// process ends; ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	s, err := prepareServer(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("pgserver: start: %w", err)
	}
	if err := s.makeCluster(ctx); err != nil {
		return nil, fmt.Errorf("pgserver: start: %w", errors.Join(err, s.dir.remove()))
	}
	if err := s.firstStart(ctx); err != nil {
		return nil, fmt.Errorf("pgserver: start: %w", errors.Join(err, s.dir.remove()))
	}
	return s, nil
}

// Connections returns how many connections the server has received, if log_connections is on.
func (s *Server) Connections() int { return s.log.received() }

// Standby starts a hot standby that streams from s. Its settings are those of
// s with cfg's on top. It returns when the standby accepts connections and
// receives.
func (s *Server) Standby(ctx context.Context, cfg Config) (*Server, error) {
	settings := maps.Clone(s.cfg.Settings) // a standby's limits must not be below its primary's
	if settings == nil {
		settings = map[string]string{}
	}
	maps.Copy(settings, cfg.Settings)
	cfg.Settings, cfg.Binaries = settings, s.cfg.Binaries
	standby, err := prepareServer(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("pgserver: standby: %w", err)
	}
	standby.password = s.password // passwords are part of what is copied
	err = run(ctx, standby.dir.socket(), standby.as, cfg.Binaries.tool("pg_basebackup"),
		"--dbname", s.URL("postgres"), "--pgdata", standby.dir.data(),
		"--write-recovery-conf", "--checkpoint=fast", "--wal-method=stream", "--no-sync")
	if err == nil {
		err = standby.firstStart(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("pgserver: standby: %w", errors.Join(err, standby.dir.remove()))
	}
	if err := standby.await(ctx, standby.process, "select exists (select from pg_stat_wal_receiver where status = 'streaming')"); err != nil {
		return nil, fmt.Errorf("pgserver: standby does not receive: %w%s",
			errors.Join(err, standby.Stop(context.WithoutCancel(ctx))), quoted(standby.log.String()))
	}
	return standby, nil
}

// Detach cuts a standby off from its primary. It returns when nothing is received
// any more.
func (s *Server) Detach(ctx context.Context) error {
	err := s.exec(ctx, "alter system set primary_conninfo = ''", "select pg_reload_conf()")
	if err == nil {
		err = s.await(ctx, s.current(), "select not exists (select from pg_stat_wal_receiver)")
	}
	if err != nil {
		return fmt.Errorf("pgserver: detach: %w", err)
	}
	return nil
}

// Promote makes a standby a primary. It returns when it can write.
func (s *Server) Promote(ctx context.Context) error {
	err := s.exec(ctx, "select pg_promote(wait => false)")
	if err == nil {
		err = s.await(ctx, s.current(), "select not pg_is_in_recovery()")
	}
	if err != nil {
		return fmt.Errorf("pgserver: promote: %w", err)
	}
	return nil
}

// Demote restarts a primary as a hot standby, which receives from nobody until
// it is told from whom, and can be promoted again.
func (s *Server) Demote(ctx context.Context) error {
	signal := filepath.Join(s.dir.data(), "standby.signal")
	if err := errors.Join(os.WriteFile(signal, nil, 0o600), s.as.own(signal)); err != nil {
		return fmt.Errorf("pgserver: demote: %w", err)
	}
	return s.Restart(ctx)
}

// Restart stops the server if it runs, and starts it on the same data, at the
// same address. It works after Crash and Kill, too.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.shutDown(ctx); err != nil {
		return fmt.Errorf("pgserver: restart: %w", err)
	}
	if err := s.launch(ctx); err != nil {
		return fmt.Errorf("pgserver: restart: %w", err)
	}
	return nil
}

// Crash makes the server end at once, without a checkpoint and without a word
// to its clients but the end of their connections: what pg_ctl calls an
// immediate shutdown. The next Restart recovers from the log.
func (s *Server) Crash() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.crash(); err != nil {
		return fmt.Errorf("pgserver: crash: %w", err)
	}
	return nil
}

// Kill kills the server and all its processes with SIGKILL, as a failing
// machine would.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.process.signalAll(syscall.SIGKILL); err != nil {
		return fmt.Errorf("pgserver: kill: %w", err)
	}
	<-s.process.done
	return nil
}

// Freeze stops all processes of the server in their tracks until Thaw: it keeps
// its connections and answers nothing.
func (s *Server) Freeze() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.process.signalAll(sigFreeze); err != nil {
		return fmt.Errorf("pgserver: freeze: %w", err)
	}
	return nil
}

// Thaw lets a frozen server go on.
func (s *Server) Thaw() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.process.signalAll(sigThaw); err != nil {
		return fmt.Errorf("pgserver: thaw: %w", err)
	}
	return nil
}

// Stop shuts the server down and removes all that is left of it. Connections
// are cut. When ctx is done first, the server is made to crash instead: it is
// gone in every case. A second Stop does nothing.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.shutDown(ctx)
	if err != nil {
		err = s.crash()
	}
	if !s.counted {
		s.counted = true
		err = errors.Join(err, (&Counts{Servers: 1, Connections: s.Connections()}).Report())
	}
	if err = errors.Join(err, s.dir.remove()); err != nil {
		return fmt.Errorf("pgserver: stop: %w", err)
	}
	return nil
}

// URL returns a connection string for a database of the server, for the
// superuser, through the socket. pgx, psql and every other libpq program
// understand it.
func (s *Server) URL(database string) string { return socketURL(s.dir.socket(), s.port, database) }

// TCPURL is as URL, through TCP with a password. It is empty if the server does
// not listen there.
func (s *Server) TCPURL(database string) string {
	address := s.address()
	if address == "" {
		return ""
	}
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(Superuser, s.password),
		Host:     net.JoinHostPort(address, strconv.Itoa(s.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// address is where the server listens beside its socket, if anywhere.
func (s *Server) address() string {
	switch {
	case s.cfg.Network != nil:
		return s.cfg.Network.Address
	case s.cfg.TCP:
		return "127.0.0.1"
	}
	return ""
}

// sharesPorts says whether other programs may take the server's port.
func (s *Server) sharesPorts() bool { return s.cfg.TCP && s.cfg.Network == nil }

// PID returns the process id of the postmaster that runs, or ran last.
func (s *Server) PID() int { return s.current().cmd.Process.Pid }

// DataDir returns the directory of the database cluster.
func (s *Server) DataDir() string { return s.dir.data() }

// Version returns the server's version, such as 15.18.
func (s *Server) Version() string { return s.cfg.Binaries.Version }

// Description says for people which server this is, such as "PostgreSQL 15.18
// from /usr/lib/postgresql/15/bin".
func (s *Server) Description() string { return s.cfg.Binaries.String() }

// LogTail returns the last lines of the server's log.
func (s *Server) LogTail() string { return s.log.String() }

// socketURL names a database behind a socket.
func socketURL(dir string, port int, database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User(Superuser),
		Path:     "/" + database,
		RawQuery: url.Values{"host": {dir}, "port": {strconv.Itoa(port)}}.Encode(),
	}
	return u.String()
}

// current returns the postmaster that runs, or ran last.
func (s *Server) current() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process
}

// prepareServer makes everything but the cluster.
func prepareServer(ctx context.Context, cfg Config) (*Server, error) {
	err := supported()
	if err != nil {
		return nil, err
	}
	if cfg.Binaries == (Binaries{}) {
		if cfg.Binaries, err = Find(); err != nil {
			return nil, err
		}
	}
	s := &Server{cfg: cfg, log: &tail{also: cfg.Log}, password: rand.Text()}
	if s.as, err = serverAccount(); err != nil {
		return nil, err
	}
	if s.dir, err = makeDirectory(ctx, cfg.Binaries, s.as, cfg.OnDisk); err != nil {
		return nil, err
	}
	return s, nil
}

// shutDown stops the server in good order, if it runs.
func (s *Server) shutDown(ctx context.Context) error {
	if err := s.process.signalAll(sigThaw); err != nil { // a frozen one would not hear
		return err
	}
	if err := s.process.signal(syscall.SIGINT); err != nil { // a fast shutdown
		return err
	}
	return s.process.wait(ctx)
}

// crash stops the server at once. The postmaster itself sees to it that its
// children end within seconds, so there is nothing to bound the wait with.
func (s *Server) crash() error {
	if err := s.process.signalAll(sigThaw); err != nil {
		return err
	}
	if err := s.process.signal(syscall.SIGQUIT); err != nil {
		return err
	}
	<-s.process.done
	return nil
}

// launch starts the postmaster and waits until it accepts connections.
func (s *Server) launch(ctx context.Context) error {
	cmd := exec.Command(s.cfg.Binaries.tool("postgres"), "-D", s.dir.data(), "-c", "config_file="+s.dir.config())
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.ExtraFiles = []*os.File{s.dir.lock} // see removeStale
	prepare(cmd, s.dir.data(), s.as, syscall.SIGQUIT)
	cmd.Env = append(cmd.Env, s.cfg.Env...)
	p, err := startProcess(cmd, s.cfg.Network)
	if err != nil {
		return err
	}
	s.process = p
	s.awaitStatus(ctx, p)
	if err := s.await(ctx, p, "select true"); err != nil {
		return fmt.Errorf("the server does not come up: %w%s", errors.Join(err, s.crash()), quoted(s.log.String()))
	}
	return nil
}

// awaitStatus waits until the server says that it accepts connections, in the file that pg_ctl
// reads, or has ended. To try meanwhile would cost a process each time.
func (s *Server) awaitStatus(ctx context.Context, p *process) {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		const pid, status = 0, 7 // lines
		text, _ := os.ReadFile(filepath.Join(s.dir.data(), "postmaster.pid"))
		if lines := strings.Split(string(text), "\n"); len(lines) > status && lines[pid] == strconv.Itoa(p.cmd.Process.Pid) {
			switch strings.TrimSpace(lines[status]) {
			case "ready", "standby":
				return
			}
		}
		select {
		case <-p.done:
			return
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// await waits until the query returns true. A server that is not there yet
// counts as false; one that has ended is an error, and so is the end of ctx.
func (s *Server) await(ctx context.Context, p *process, query string) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		yes, err := s.ask(ctx, query)
		if yes {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("postgres ended: %w", errors.Join(p.err, err))
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-ticker.C:
		}
	}
}

// exec runs statements, each in a transaction of its own.
func (s *Server) exec(ctx context.Context, statements ...string) error {
	conn, err := pgconn.Connect(ctx, s.URL("postgres"))
	for _, sql := range statements {
		if err == nil {
			_, err = conn.Exec(ctx, sql).ReadAll()
		}
	}
	if conn == nil {
		return err
	}
	return errors.Join(err, conn.Close(ctx))
}

// ask runs a query that returns one boolean.
func (s *Server) ask(ctx context.Context, query string) (yes bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second) // a starting server may leave an attempt without an answer
	defer cancel()
	conn, err := pgconn.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return false, err
	}
	results, err := conn.Exec(ctx, query).ReadAll()
	if err := errors.Join(err, conn.Close(ctx)); err != nil {
		return false, err
	}
	return string(results[0].Rows[0][0]) == "t", nil
}
