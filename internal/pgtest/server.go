// This file holds the servers: the one that the tests of a package share, and
// private ones for tests that break theirs.

package pgtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
)

// startPatience bounds the choice and the start of a server. It has room for
// the minute that an image may take to be pulled.
const startPatience = 3 * time.Minute

var shared struct {
	once   sync.Once
	server *choose.Server
	err    error
}

// serverURL returns the connection string of the server that this package's
// tests share. The first test to ask starts it.
func serverURL(tb testing.TB) string {
	tb.Helper()
	shared.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), startPatience)
		defer cancel()
		shared.server, shared.err = choose.Start(ctx)
		if shared.err == nil && os.Getenv(choose.DatabaseEnv) == "" {
			fmt.Fprintln(os.Stderr, shared.server)
		}
	})
	if shared.err != nil {
		tb.Fatalf("pgtest: %v", shared.err)
	}
	return shared.server.URL
}

// Main runs a package's tests, and stops the server that they shared:
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
// The process then exits with the tests' result.
func Main(m *testing.M) {
	code := m.Run()
	if !dropTemplates() {
		code = max(code, 1)
	}
	if shared.server != nil {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := shared.server.Stop(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// Private starts a server that the test has for itself, from the binaries of
// this machine, and that it may kill, freeze, restart or replicate. It is
// stopped when the test is over. cfg's settings come on top of those of all
// test servers; "fsync": "on" gives a test of durability what it needs.
func Private(tb testing.TB, cfg pgserver.Config) *pgserver.Server {
	tb.Helper()
	settings := choose.Settings()
	maps.Copy(settings, cfg.Settings)
	cfg.Settings = settings
	ctx, cancel := context.WithTimeout(context.Background(), startPatience)
	defer cancel()
	server, err := pgserver.Start(ctx, cfg)
	return own(tb, server, err)
}

// Standby starts a hot standby of a private server, stopped when the test is
// over.
func Standby(tb testing.TB, primary *pgserver.Server, cfg pgserver.Config) *pgserver.Server {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startPatience)
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
		t.Skip(err)
	}
	for i, program := range programs {
		for _, mode := range []string{"session", "transaction", "statement"} {
			t.Run(fmt.Sprintf("%d %s", i, mode), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(context.Background(), startPatience)
				defer cancel()
				pooler, err := server.Pooler(ctx, program, map[string]string{"pool_mode": mode})
				if err != nil {
					t.Fatalf("pgtest: %v", err)
				}
				t.Cleanup(func() {
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					defer cancel()
					if err := pooler.Stop(ctx); err != nil {
						t.Errorf("pgtest: %v", err)
					}
					if t.Failed() {
						t.Logf("the end of the pooler's log:\n%s", pooler.LogTail())
					}
				})
				test(t, mode, pooler)
			})
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
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			tb.Errorf("pgtest: %v", err)
		}
		if tb.Failed() {
			tb.Logf("the end of the server's log:\n%s", server.LogTail())
		}
	})
	return server
}
