package othertools_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/leaktest"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/migrations"
)

// server is one of our own, from the programs of this machine: its pg_dump is
// of its version. admin makes its databases.
var (
	server *pgserver.Server
	admin  *pgxpool.Pool
)

// patience bounds each wait. No wait of a correct program comes near it, however slow the machine is.
const patience = 15 * time.Minute

func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() { // all tests are long
		os.Exit(m.Run())
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	if server, err = pgserver.Start(ctx, pgserver.Config{Settings: map[string]string{"fsync": "off", "max_connections": "200"}}); err == nil {
		admin, err = pgxpool.New(ctx, server.URL("postgres"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	admin.Close()
	if err := server.Stop(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	// When a migration fails, golang-migrate leaves the goroutines that have read the next ones.
	os.Exit(leaktest.Check(code, "github.com/golang-migrate/migrate/v4.(*Migration).Buffer"))
}

// long skips a test in a run with -short: make test-all runs the other tools.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
}

// database is one of a test's own.
type database struct {
	name string
	pool *pgxpool.Pool
}

var databases atomic.Int64

func newDatabase(t *testing.T) database {
	t.Helper()
	db := database{name: fmt.Sprint("test_", databases.Add(1))}
	_, err := admin.Exec(t.Context(), "create database "+db.name)
	must(t, err)
	db.pool, err = pgxpool.New(t.Context(), db.url())
	must(t, err)
	t.Cleanup(db.pool.Close)
	return db
}

func (db database) url() string { return server.URL(db.name) }

func (db database) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := db.pool.Exec(t.Context(), sql)
	must(t, err)
}

// dump is what pg_dump says of all that is not a tool's own.
func (db database) dump(t *testing.T) string {
	t.Helper()
	text, err := server.Dump(t.Context(), db.name, "--exclude-table="+migrations.Table, "--exclude-table=*."+migrations.Table,
		"--exclude-table=*.goose_db_version*", "--exclude-table=*.schema_version", "--exclude-table=*.schema_migrations")
	must(t, err)
	return text
}

// same fails the test, showing the lines that differ, unless both are equal.
func same(t *testing.T, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			t.Fatalf("line %d: %q, want %q", i+1, g[i], w[i])
		}
	}
	t.Fatalf("%d lines, want %d", len(g), len(w))
}

// installed fails the test unless that version is installed in the schema.
func (db database) installed(t *testing.T, schema string, want uint) {
	t.Helper()
	status, err := migrations.Version(t.Context(), db.pool, &migrations.Config{Schema: schema})
	must(t, err)
	if status.Installed != want {
		t.Errorf("version %d is installed, want %d", status.Installed, want)
	}
}

// expect fails the test unless the query gives the value.
func expect[T comparable](t *testing.T, db database, want T, sql string, args ...any) {
	t.Helper()
	var got T
	must(t, db.pool.QueryRow(t.Context(), sql, args...).Scan(&got))
	if got != want {
		t.Errorf("got %v, want %v: %s", got, want, sql)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
