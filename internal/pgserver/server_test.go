//go:build !windows

package pgserver

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// clusters are copied for the tests' servers, but for those whose temporary files
// belong elsewhere.
var (
	clusters Clusters
	tmpdir   = os.Getenv("TMPDIR")
)

// long skips the test in a run with -short: see pgtest.Long, which this package cannot import.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
}

// patience bounds each wait, as pgtest.Patience does.
const patience = 15 * time.Minute

// start starts a server for the test.
func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	if cfg.Clusters == nil && os.Getenv("TMPDIR") == tmpdir {
		cfg.Clusters = &clusters
	}
	if cfg.Settings == nil {
		cfg.Settings = map[string]string{"fsync": "off"}
	}
	s, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, s)
	return s
}

func stopAtEnd(t *testing.T, s *Server) {
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// runSQL runs SQL on a new connection.
func runSQL(t *testing.T, s *Server, sql string) {
	t.Helper()
	if _, err := connect(t, s.URL("postgres")).Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// value returns the one value of a query, as text. It leaves no connection, so that it
// can be asked for as often as it takes.
func value(t *testing.T, url, sql string) (v string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	if err := conn.QueryRow(t.Context(), "select ("+sql+")::text").Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// eventually polls until the condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(pollInterval) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

func TestServerIsWhatTheConfigurationSays(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	s, err := Start(t.Context(), Config{
		Settings:   map[string]string{"fsync": "off", "application_name": `it's a \ test`, "log_connections": "off"}, // of which LogTail keeps no lines
		InitdbArgs: []string{"--data-checksums"},
		Log:        &log,
	})
	if err != nil {
		t.Fatal(err)
	}
	for sql, want := range map[string]string{
		"current_setting('fsync')":                              "off",
		"current_setting('synchronous_commit')":                 "on",
		"current_setting('application_name')":                   `it's a \ test`,
		"current_setting('data_checksums')":                     "on",
		"current_setting('listen_addresses')":                   "",
		"current_setting('server_encoding')":                    "UTF8",
		"current_setting('wal_level')":                          "replica",
		"current_setting('data_directory')":                     s.DataDir(),
		"current_user":                                          Superuser,
		"split_part(current_setting('server_version'), ' ', 1)": s.Version(),
		"select datcollate from pg_database where oid = 1":      "C",
	} {
		if got := value(t, s.URL("postgres"), sql); got != want {
			t.Errorf("%s is %q, want %q", sql, got, want)
		}
	}
	if s.TCPURL("postgres") != "" {
		t.Error("a server on a socket has a TCP address")
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if !gone(s.dir.path) {
		t.Errorf("%s is still there", s.dir.path)
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Errorf("second stop: %v", err)
	}
	if !strings.HasSuffix(log.String(), s.LogTail()) || !strings.Contains(log.String(), "database system is shut down") {
		t.Errorf("log: %s", log.String())
	}
}

func TestServersOfCopiedClustersAreApart(t *testing.T) {
	long(t)
	t.Setenv(ClustersEnv, "") // else the first one stays for other processes
	var clusters Clusters
	cfg := Config{Settings: map[string]string{"fsync": "off"}, Clusters: &clusters, TCP: true}
	one, two := start(t, cfg), start(t, cfg)
	first := clusters.made[slices.Collect(maps.Keys(clusters.made))[0]].dir.path
	if err := clusters.Remove(); err != nil || !gone(first) {
		t.Errorf("%s is left: %v", first, err)
	}
	runSQL(t, one, "create table only_here ()")
	for s, want := range map[*Server]string{one: "true", two: "false"} {
		if got := value(t, s.TCPURL("postgres"), "to_regclass('only_here') is not null"); got != want {
			t.Errorf("the table is there: %s, want %s", got, want)
		}
	}
	if err := two.Restart(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestServerSyncsItsDataUnlessToldOtherwise(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{Settings: map[string]string{}})
	if got := value(t, s.URL("postgres"), "current_setting('fsync')"); got != "on" {
		t.Errorf("fsync is %s, want on", got)
	}
}

func TestTCPWantsThePassword(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{TCP: true})
	if got := value(t, s.TCPURL("postgres"), "inet_server_addr()"); got != "127.0.0.1/32" {
		t.Errorf("connected to %s", got)
	}
	if got := value(t, s.URL("postgres"), "inet_server_addr() is null"); got != "true" {
		t.Error("URL does not lead to the socket")
	}
	u, err := url.Parse(s.TCPURL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(Superuser, "guess")
	if conn, err := pgx.Connect(t.Context(), u.String()); err == nil {
		_ = conn.Close(t.Context())
		t.Error("any password will do")
	}
}

func TestPortThatIsTakenIsNoticed(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := &Server{cfg: Config{TCP: true}, port: l.Addr().(*net.TCPAddr).Port}
	if !s.portTaken() {
		t.Error("a taken port is free")
	}
	if err := s.choosePort(); err != nil || s.portTaken() {
		t.Errorf("port %d is not free (%v)", s.port, err)
	}
}

func TestOnlyWeReachTheSocket(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{})
	info, err := os.Stat(s.dir.socket())
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o700 {
		t.Errorf("socket's directory is %s", info.Mode())
	}
}

func TestDataSurvivesEveryWayToGoDown(t *testing.T) {
	t.Parallel()
	ways := map[string]func(*Server) error{"kill": (*Server).Kill}
	if !testing.Short() {
		ways["restart"] = func(*Server) error { return nil }
		ways["crash"] = (*Server).Crash
		ways["freeze"] = (*Server).Freeze
	}
	for name, down := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, Config{})
			runSQL(t, s, "create table kept as select 42 as n")
			held := connect(t, s.URL("postgres"))
			pid, url := s.PID(), s.URL("postgres")
			if err := down(s); err != nil {
				t.Fatal(err)
			}
			if err := s.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			if s.PID() == pid || s.URL("postgres") != url {
				t.Errorf("pid %d, then %d; url %s, then %s", pid, s.PID(), url, s.URL("postgres"))
			}
			if got := value(t, s.URL("postgres"), "select n from kept"); got != "42" {
				t.Errorf("got %s, want 42", got)
			}
			if err := held.Ping(t.Context()); err == nil {
				t.Error("a connection survived")
			}
		})
	}
}

func TestCrashAndKillLeaveNoProcess(t *testing.T) {
	long(t)
	t.Parallel()
	for name, down := range map[string]func(*Server) error{"crash": (*Server).Crash, "kill": (*Server).Kill} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, Config{})
			pids := append(children(s.PID()), s.PID())
			if len(pids) < 2 {
				t.Fatalf("the server has no children: %v", pids)
			}
			if err := down(s); err != nil {
				t.Fatal(err)
			}
			// They have closed all they had open; the kernel may still be at the rest.
			eventually(t, "all processes are gone", func() bool { return !slices.ContainsFunc(pids, alive) })
		})
	}
}

func TestFrozenServerAnswersAfterItsThaw(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{})
	conn := connect(t, s.URL("postgres"))
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() { answer <- conn.Ping(t.Context()) }()
	if ok, err := s.ask(t.Context(), "select true"); err == nil {
		t.Errorf("a frozen server answers %t", ok)
	}
	select {
	case err := <-answer:
		t.Errorf("a frozen connection answers: %v", err)
	default:
	}
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Errorf("after the thaw: %v", err)
	}
}

func TestStandbyStreamsAndIsPromoted(t *testing.T) {
	long(t)
	t.Parallel()
	primary := start(t, Config{Settings: map[string]string{"fsync": "off", "max_connections": "120"}})
	runSQL(t, primary, "create table t as select 1 as n")
	standby, err := primary.Standby(t.Context(), Config{TCP: true})
	if err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, standby)
	runSQL(t, primary, "insert into t values (2)")
	eventually(t, "the standby has both rows", func() bool {
		return value(t, standby.TCPURL("postgres"), "select count(*) from t") == "2"
	})
	if _, err := connect(t, standby.URL("postgres")).Exec(t.Context(), "insert into t values (3)"); err == nil {
		t.Error("a standby can write")
	}
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	runSQL(t, standby, "insert into t values (3)")
	if got := value(t, standby.URL("postgres"), "select count(*) from t"); got != "3" {
		t.Errorf("%s rows, want 3", got)
	}
}

func TestDetachedStandbyGetsNothingMore(t *testing.T) {
	long(t)
	t.Parallel()
	primary := start(t, Config{})
	runSQL(t, primary, "create table t as select 1 as n")
	standby, err := primary.Standby(t.Context(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, standby)
	if err := standby.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	runSQL(t, primary, "insert into t values (2)")
	eventually(t, "the primary has heard that nobody receives", func() bool {
		return value(t, primary.URL("postgres"), "select count(*) from pg_stat_replication") == "0"
	})
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value(t, standby.URL("postgres"), "select count(*) from t"); got != "1" {
		t.Errorf("%s rows, want 1", got)
	}
}

func TestDemotedServerReadsUntilItIsPromoted(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{})
	runSQL(t, s, "create table t as select 1 as n")
	if err := s.Demote(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := value(t, s.URL("postgres"), "select count(*) from t where pg_is_in_recovery()"); got != "1" {
		t.Errorf("%s rows, want 1", got)
	}
	if err := s.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	runSQL(t, s, "insert into t values (2)")
}

func TestServerThatDoesNotComeUpSaysWhy(t *testing.T) {
	long(t)
	t.Parallel()
	_, err := Start(t.Context(), Config{Settings: map[string]string{"max_connections": "many"}})
	if err == nil || !strings.Contains(err.Error(), "max_connections") {
		t.Errorf("the error should show the server's log: %v", err)
	}
	_, err = Start(t.Context(), Config{InitdbArgs: []string{"--no-such-option"}})
	if err == nil || !strings.Contains(err.Error(), "no-such-option") {
		t.Errorf("the error should show initdb's output: %v", err)
	}
}

func TestStartIsGivenUpWithItsContext(t *testing.T) {
	long(t)
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Start(ctx, Config{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func TestStopDoesNotDependOnItsContext(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Stop(ctx); err != nil {
		t.Error(err)
	}
	if !gone(s.dir.path) {
		t.Errorf("%s is still there", s.dir.path)
	}
}

func TestDataAreKeptInMemoryUnlessADiskIsAskedFor(t *testing.T) {
	long(t)
	t.Setenv("TMPDIR", "")
	place := memory()
	if place == "" {
		t.Skip("there is no room for files in memory")
	}
	for _, onDisk := range []bool{false, true} {
		s := start(t, Config{OnDisk: onDisk})
		if got := filepath.Dir(s.dir.path) == place; got == onDisk && memory() == place { // which others may have filled meanwhile
			t.Errorf("on disk: %t, and the server is in %s", onDisk, s.dir.path)
		}
	}
}

func TestDirectoryOutOfReachIsNotUsed(t *testing.T) {
	long(t)
	closed := filepath.Join(t.TempDir(), "closed")
	long := filepath.Join(t.TempDir(), strings.Repeat("long", maxSocketPath/4))
	for _, dir := range []string{closed, long} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, tmpdir := range map[string]string{
		"closed to the server's user": closed, "too long for a socket": long, "not there": filepath.Join(closed, "no"),
	} {
		t.Run(name, func(t *testing.T) {
			if tmpdir == closed && os.Geteuid() != 0 {
				t.Skip("the server runs as ourselves, and nothing of ours is closed to us")
			}
			t.Setenv("TMPDIR", tmpdir)
			s := start(t, Config{})
			if strings.HasPrefix(s.dir.path, tmpdir) {
				t.Errorf("server is in %s", s.dir.path)
			}
			left, err := filepath.Glob(filepath.Join(tmpdir, dirPrefix+"*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %v %v", left, err)
			}
		})
	}
}
