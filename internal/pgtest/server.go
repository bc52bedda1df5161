// The tests of a package share one server; tests that break theirs have private ones.

package pgtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock/internal/leaktest"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
)

var shared struct {
	once   sync.Once
	server *choose.Server
	admin  *administrator
	err    error
}

// serverURL returns the connection string of the server that this package's
// tests share. The first test to ask starts it.
func serverURL(tb testing.TB) string {
	tb.Helper()
	shared.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		if shared.server, shared.err = choose.Start(ctx); errors.Is(shared.err, choose.ErrNoServer) {
			giveUp(shared.err)
		}
		if shared.err == nil && os.Getenv(choose.DatabaseEnv) == "" {
			fmt.Fprintln(os.Stderr, shared.server)
		}
		if shared.err == nil {
			shared.admin, shared.err = newAdministrator(shared.server.URL)
		}
	})
	if shared.err != nil {
		tb.Fatalf("pgtest: %v", shared.err)
	}
	return shared.server.URL
}

// giveUp ends the tests of this package: without a server each of them would say the same.
func giveUp(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// Main runs a package's tests, stops the server that they shared, and fails if goroutines are
// left:
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
// The process then exits with the tests' result. leaktest.Check says what ignored is.
func Main(m *testing.M, ignored ...string) {
	code := m.Run()
	if !dropTemplates() {
		code = max(code, 1)
	}
	if shared.admin != nil {
		shared.admin.pool.Close()
		if err := (&pgserver.Counts{Databases: int(shared.admin.made.Load())}).Report(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
			code = max(code, 1)
		}
	}
	if shared.server != nil {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		if err := shared.server.Stop(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
			code = max(code, 1)
		}
	}
	if err := clusters.Remove(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		code = max(code, 1)
	}
	os.Exit(leaktest.Check(code, ignored...))
}

// clusters are what the private servers of a package begin with.
var clusters pgserver.Clusters

// Private starts a server that the test has for itself, from the binaries of
// this machine, and that it may kill, freeze, restart or replicate. It is
// stopped when the test is over. cfg's settings come on top of those of all
// test servers; "fsync": "on" gives a test of durability what it needs.
func Private(tb testing.TB, cfg pgserver.Config) *pgserver.Server {
	tb.Helper()
	settings := choose.Settings()
	maps.Copy(settings, cfg.Settings)
	cfg.Settings, cfg.Clusters = settings, &clusters
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	server, err := pgserver.Start(ctx, cfg)
	if errors.Is(err, pgserver.ErrNoBinaries) {
		serverURL(tb) // gives up where there is none at all
	}
	return own(tb, server, err)
}

// Standby starts a hot standby of a private server, stopped when the test is
// over.
func Standby(tb testing.TB, primary *pgserver.Server, cfg pgserver.Config) *pgserver.Server {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	server, err := primary.Standby(ctx, cfg)
	return own(tb, server, err)
}

// EachPooler runs a test once for each PgBouncer of this machine and each of its
// pool modes, in front of the server. It skips the test if there is none.
func EachPooler(t *testing.T, server *pgserver.Server, test func(t *testing.T, mode string, pooler *pgserver.Pooler)) {
	t.Helper()
	programs, err := pgserver.FindPoolers()
	if err != nil {
		Missing(t, "pooler", err)
	}
	for i, program := range programs {
		for _, mode := range []string{"session", "transaction", "statement"} {
			t.Run(fmt.Sprintf("%d %s", i, mode), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(context.Background(), Patience)
				defer cancel()
				pooler, err := server.Pooler(ctx, program, map[string]string{"pool_mode": mode})
				if err != nil {
					t.Fatalf("pgtest: %v", err)
				}
				stopAfter(t, "pooler", pooler)
				test(t, mode, pooler)
			})
		}
	}
}

// Balancer starts a Pgpool-II in front of a server and its standby, stopped when the test is over.
// It skips the test if this machine has none.
func Balancer(t *testing.T, server, standby *pgserver.Server, settings map[string]string) *pgserver.Balancer {
	t.Helper()
	program, err := pgserver.FindBalancer()
	if err != nil {
		Missing(t, "pooler", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	balancer, err := server.Balancer(ctx, program, standby, settings)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	stopAfter(t, "balancer", balancer)
	return balancer
}

// ServerSessions returns what the next clients of a pooler find in its two server
// sessions, by the pids of these: every setting, what is prepared and what they
// listen to.
func ServerSessions(t *testing.T, server *pgserver.Server, pooler *pgserver.Pooler) map[uint32]string {
	t.Helper()
	const together = 7326158 // sessions that take this lock shared wait, so that none serves both clients
	const found = `with waited as materialized (select pg_advisory_xact_lock_shared($1))
		select pg_backend_pid(), (select string_agg(name || ' = ' || setting, E'\n' order by name) from pg_settings
		          where name not in ('transaction_isolation', 'transaction_read_only', 'transaction_deferrable') -- new in each transaction
		            and not (name like '%.%' and source = 'default'))                                            -- of a library that was loaded
		       || coalesce((select E'\nprepared: ' || string_agg(statement, ', ') from pg_prepared_statements where not starts_with(name, 'PGBOUNCER_')), '')
		       || coalesce((select E'\nlistens: ' || string_agg(channel, ', ') from pg_listening_channels() channel), '')
		  from waited`
	gate := Connect(t, server.URL("postgres"))
	ask := func(sql string, dest ...any) {
		t.Helper()
		if err := gate.QueryRow(t.Context(), sql, together).Scan(dest...); err != nil {
			t.Fatal(err)
		}
	}
	ask("select pg_advisory_lock($1)::text", new(string))
	type session struct {
		pid  uint32
		text string
		err  error
	}
	answers := make(chan session, 2)
	for range cap(answers) {
		conn := Connect(t, pooler.URL("postgres")+"&default_query_exec_mode=exec&application_name=next")
		go func() {
			var s session
			s.err = conn.QueryRow(t.Context(), found, together).Scan(&s.pid, &s.text)
			_ = conn.Close(context.WithoutCancel(t.Context())) // in session mode it has one of the sessions
			answers <- s
		}()
	}
	for waiting := 0; waiting < cap(answers); {
		if ask("select count(*) from pg_locks where locktype = 'advisory' and objid = $1::bigint::oid and not granted", &waiting); t.Context().Err() != nil {
			t.Fatal(t.Context().Err())
		}
	}
	ask("select pg_advisory_unlock($1)", new(bool))
	all := map[uint32]string{}
	for range cap(answers) {
		s := <-answers
		if s.err != nil {
			t.Fatal(s.err)
		}
		all[s.pid] = s.text
	}
	_ = gate.Close(t.Context())
	return all
}

// SameSessions fails the test, naming the lines, unless the sessions of a pooler are as
// they were.
func SameSessions(t *testing.T, step string, before, after map[uint32]string) {
	t.Helper()
	for pid, text := range after {
		was := map[string]bool{}
		for _, one := range before { // a session that is new is as all were
			for line := range strings.Lines(one + "\n") {
				was[line] = true
			}
		}
		for line := range strings.Lines(text + "\n") {
			if !was[line] {
				t.Errorf("after %s the next client finds in server session %d: %s", step, pid, line)
			}
		}
	}
}

// own makes the test stop the server, or fail if there is none.
func own(tb testing.TB, server *pgserver.Server, err error) *pgserver.Server {
	tb.Helper()
	if errors.Is(err, pgserver.ErrNoBinaries) {
		tb.Fatalf("pgtest: this test breaks its server, so it needs one of its own: %v (as root on Debian: scripts/install-postgres)", err)
	}
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	stopAfter(tb, "server", server)
	return server
}

// stopAfter stops a program when the test is over, and shows the end of its log if the test failed.
func stopAfter(tb testing.TB, what string, program interface {
	Stop(context.Context) error
	LogTail() string
},
) {
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		if err := program.Stop(ctx); err != nil {
			tb.Errorf("pgtest: %v", err)
		}
		if tb.Failed() {
			tb.Logf("the end of the %s's log:\n%s", what, program.LogTail())
		}
	})
}
