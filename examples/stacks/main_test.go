package stacks_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"

	"github.com/pgxlock/pgxlock/internal/leaktest"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/migrations"
)

// patience bounds each wait, and turns a hang into a message. No wait of a correct program comes
// near it, however slow and busy the machine is.
const patience = 15 * time.Minute

//go:embed tables.sql
var tables string

// database is what all tests share: each has events, orders, days and keys of
// its own there.
var database struct {
	url  string // of the tests' own schema
	pool *pgxpool.Pool
}

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	// GORM never ends the goroutine of its cache of prepared statements.
	os.Exit(leaktest.Check(code, "gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

// run makes a schema for the tests on the server that PGXLOCK_TEST_DATABASE
// names, else on one of its own, from the binaries of this machine.
func run(m *testing.M) (code int, err error) {
	server := os.Getenv("PGXLOCK_TEST_DATABASE")
	for _, entry := range os.Environ() { // both drivers would mix these in
		if name, _, _ := strings.Cut(entry, "="); strings.HasPrefix(name, "PG") {
			_ = os.Unsetenv(name) // fails for malformed names only
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if server == "" {
		own, err := pgserver.Start(ctx, pgserver.Config{Settings: map[string]string{"fsync": "off", "max_connections": "200"}})
		if err != nil {
			return 1, fmt.Errorf("%w; set PGXLOCK_TEST_DATABASE to a connection string instead", err)
		}
		defer func() { err = errors.Join(err, own.Stop(context.Background())) }()
		server = own.URL("postgres")
	}

	schema := "pgxlock_test_" + strings.ToLower(rand.Text())
	if database.url, err = with(server, "search_path", schema); err != nil {
		return 1, err
	}
	if database.pool, err = pgxpool.New(ctx, database.url); err != nil {
		return 1, err
	}
	defer database.pool.Close()
	defer func() {
		_, dropped := database.pool.Exec(context.Background(), "DROP SCHEMA IF EXISTS "+schema+" CASCADE")
		err = errors.Join(err, dropped)
	}()
	if err := migrations.Up(ctx, database.pool, &migrations.Config{Schema: schema}); err != nil {
		return 1, err
	}
	if _, err := database.pool.Exec(ctx, tables); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// with adds a word to a connection string of either form.
func with(connString, word, value string) (string, error) {
	if !strings.Contains(connString, "://") {
		return connString + " " + word + "=" + value, nil
	}
	u, err := url.Parse(connString)
	if err != nil {
		return "", errors.Unwrap(err) // the text around it repeats the password
	}
	query := u.Query()
	query.Set(word, value)
	u.RawQuery = query.Encode()
	return u.String(), nil
}

// drivers are those of database/sql that are tried.
var drivers = []driver{{title: "lib/pq", name: "postgres"}, {title: "pgx", name: "pgx"}}

type driver struct{ title, name string }

// withEachDriver runs the test as subtests.
func withEachDriver(t *testing.T, test func(t *testing.T, d driver)) {
	t.Helper()
	t.Parallel()
	for _, d := range drivers {
		t.Run(d.title, func(t *testing.T) {
			t.Parallel()
			test(t, d)
		})
	}
}

// open opens the database, closed when the test is over.
func (d driver) open(t *testing.T) *sql.DB {
	t.Helper()
	return d.openURL(t, database.url)
}

func (d driver) openURL(t *testing.T, url string) *sql.DB {
	t.Helper()
	db, err := sql.Open(d.name, url)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(10) // tests run side by side
	t.Cleanup(func() { db.Close() })
	return db
}

// begin begins a transaction that is rolled back when the test is over.
func begin(t *testing.T, db interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}, level sql.IsolationLevel,
) *sql.Tx {
	t.Helper()
	// Not the test's context: it ends before the cleanup, and the transaction would
	// end by itself.
	tx, err := db.BeginTx(context.Background(), &sql.TxOptions{Isolation: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() }) // most are over by then
	return tx
}

// readCommitted is what most of the tests begin.
func readCommitted(t *testing.T, db *sql.DB) *sql.Tx {
	t.Helper()
	return begin(t, db, sql.LevelReadCommitted)
}

// queryer is what statements are sent through.
type queryer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

func exec(t *testing.T, q queryer, text string, args ...any) {
	t.Helper()
	if _, err := q.ExecContext(context.Background(), text, args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// get returns the one value of a query.
func get[T any](t *testing.T, q queryer, text string, args ...any) (value T) {
	t.Helper()
	if err := q.QueryRowContext(context.Background(), text, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return value
}

// goesOn fails the test unless the transaction takes statements and commits.
func goesOn(t *testing.T, tx *sql.Tx) {
	t.Helper()
	exec(t, tx, "SELECT 1")
	if err := tx.Commit(); err != nil {
		t.Errorf("commit: %v", err)
	}
}

// waits returns when the session of a transaction, which is in the middle of a
// call, waits for a lock.
func waits(t *testing.T, pid int) {
	t.Helper()
	await(t, "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'", pid)
}

// pid identifies the session of a transaction.
func pid(t *testing.T, tx *sql.Tx) int {
	t.Helper()
	return get[int](t, tx, "SELECT pg_backend_pid()")
}

// await returns when the query says true.
func await(t *testing.T, query string, args ...any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		var now bool
		if err := database.pool.QueryRow(ctx, query, args...).Scan(&now); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		if now {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(5 * time.Millisecond): // until we look again
		}
	}
}
