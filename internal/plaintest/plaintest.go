// Package plaintest gives databases to the tests of modules that lack what package pgtest needs.
//
//	func TestMain(m *testing.M) { plaintest.Main(m) }
package plaintest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/leaktest"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/migrations"
)

// Patience is that of package pgtest.
const Patience = 15 * time.Minute

// The variables are those of packages choose and pgtest.
const (
	databaseEnv = "PGXLOCK_TEST_DATABASE"
	requireEnv  = "PGXLOCK_TEST_REQUIRE"
)

// server is the one that the tests of all packages share, or else one for those of this package.
var server struct {
	once sync.Once
	url  *url.URL
	own  *pgserver.Server
	drop []string // databases
	err  error
}

// Main runs a package's tests, drops what they made, and fails if goroutines are left.
func Main(m *testing.M) {
	code := m.Run()
	if shared.pool != nil {
		shared.pool.Close()
	}
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, "plaintest:", err)
		code = max(code, 1)
	}
	os.Exit(leaktest.Check(code))
}

func start() error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	address := os.Getenv(databaseEnv)
	if address == "" {
		var err error
		if server.own, err = pgserver.Start(ctx, pgserver.Config{Settings: map[string]string{"fsync": "off"}}); err != nil {
			return err
		}
		address = server.own.URL("postgres")
	}
	var err error
	server.url, err = url.Parse(address)
	return err
}

func stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	var err error
	if server.own != nil {
		return server.own.Stop(ctx)
	}
	if len(server.drop) > 0 {
		err = admin(ctx, func(conn *pgx.Conn) (err error) {
			for _, name := range server.drop {
				_, failed := conn.Exec(ctx, "drop database "+name+" with (force)")
				err = errors.Join(err, failed)
			}
			return err
		})
	}
	return err
}

func admin(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, server.url.String())
	if err != nil {
		return err
	}
	return errors.Join(do(conn), conn.Close(ctx))
}

// open makes a database with pgxlock in it.
func open(ctx context.Context) (*pgxpool.Pool, error) {
	server.once.Do(func() { server.err = start() })
	if server.err != nil {
		return nil, server.err
	}
	name := "pgxlock_test_" + strings.ToLower(rand.Text())
	err := admin(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "create database "+name+" template template0")
		return err
	})
	if err != nil {
		return nil, err
	}
	mu.Lock()
	server.drop = append(server.drop, name)
	mu.Unlock()
	own := *server.url
	own.Path = "/" + name
	pool, err := pgxpool.New(ctx, own.String())
	if err != nil {
		return nil, err
	}
	if err := migrations.Up(ctx, pool, nil); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

var mu sync.Mutex // of server.drop

// New makes a database for the test, with pgxlock in it.
func New(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	pool, err := open(tb.Context())
	if err != nil {
		tb.Fatalf("plaintest: %v", err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

var shared struct {
	once sync.Once
	pool *pgxpool.Pool
	err  error
}

// Shared returns one database for all tests of the package, with pgxlock in it: each has keys of its own.
func Shared(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	shared.once.Do(func() { shared.pool, shared.err = open(context.Background()) })
	if shared.err != nil {
		tb.Fatalf("plaintest: %v", shared.err)
	}
	return shared.pool
}

// Missing is that of package pgtest.
func Missing(tb testing.TB, what string, reason any) {
	tb.Helper()
	if slices.Contains(strings.Split(os.Getenv(requireEnv), ","), what) {
		tb.Fatalf("%s requires %q, which is missing: %v", requireEnv, what, reason)
	}
	tb.Skipf("%s is missing: %v", what, reason)
}

// Long is that of package pgtest.
func Long(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.Skip("make test-all runs it")
	}
}
