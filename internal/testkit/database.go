package testkit

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// Migrated returns a database with pgxlock in it.
func Migrated(t *testing.T) *pgtest.DB {
	t.Helper()
	return withMigrations.New(t)
}

var withMigrations = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Up(ctx, pool, nil) })

// Roomy returns the database with a pool of more connections.
func Roomy(t *testing.T, db *pgtest.DB, conns int32) *pgtest.DB {
	t.Helper()
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.MaxConns = conns })
	return &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

// On returns the database of the first of the servers, by a connection string
// that names them all, as libpq has it, with these parameters.
func On(t *testing.T, parameters string, servers ...*pgserver.Server) *pgtest.DB {
	t.Helper()
	var hosts, ports []string
	var user string
	for _, server := range servers {
		config, err := pgconn.ParseConfig(server.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		hosts, ports, user = append(hosts, config.Host), append(ports, fmt.Sprint(config.Port)), config.User
	}
	url := fmt.Sprintf("host=%s port=%s user=%s dbname=postgres %s", strings.Join(hosts, ","), strings.Join(ports, ","), user, parameters)
	return &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
}

// Behind makes the pool's configuration one of a connection string with several
// hosts, of which the pool's own come last.
func Behind(hosts ...*pgconn.FallbackConfig) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		own := &pgconn.FallbackConfig{Host: c.ConnConfig.Host, Port: c.ConnConfig.Port, TLSConfig: c.ConnConfig.TLSConfig}
		all := append(append(hosts[:len(hosts):len(hosts)], own), c.ConnConfig.Fallbacks...)
		c.ConnConfig.Host, c.ConnConfig.Port, c.ConnConfig.TLSConfig = all[0].Host, all[0].Port, all[0].TLSConfig
		c.ConnConfig.Fallbacks = all[1:]
	}
}

// Query returns the one value that a query yields.
func Query[T any](t *testing.T, db *pgtest.DB, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := db.Pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%v\n%s", err, sql)
	}
	return v
}

// Begin begins a transaction, rolled back when the test is over.
func Begin(t *testing.T, db *pgtest.DB, options pgx.TxOptions) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.BeginTx(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// Commit commits the transaction.
func Commit(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Rollback rolls the transaction back.
func Rollback(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// WithLedger returns a database with pgxlock and a table to write to.
func WithLedger(t *testing.T) *pgtest.DB {
	t.Helper()
	return withLedger.New(t)
}

var withLedger = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error {
	if err := migrations.Up(ctx, pool, nil); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, "create table ledger (n int)")
	return err
})

// WriteRow writes a row to the table of WithLedger.
func WriteRow(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "insert into ledger values (1)")
	return err
}

// Rows returns who holds what, according to the table.
func Rows(t *testing.T, db *pgtest.DB) map[string]string {
	t.Helper()
	held := make(map[string]string)
	var name, holder string
	result, err := db.Pool.Query(t.Context(), "select lock_name, holder_id from distributed_locks")
	if err != nil {
		t.Fatal(err)
	}
	_, err = pgx.ForEachRow(result, []any{&name, &holder}, func() error {
		held[name] = holder
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return held
}

// AdvisoryCount returns how many are held or waited for in the database.
func AdvisoryCount(t *testing.T, db *pgtest.DB) int {
	t.Helper()
	return Query[int](t, db, `select count(*) from pg_locks where locktype = 'advisory'
		and database = (select oid from pg_database where datname = current_database())`)
}

// WantFree checks that the key can be locked, as a try of SQL finds it.
func WantFree(t *testing.T, db *pgtest.DB, key string, want bool) {
	t.Helper()
	if got := Query[bool](t, db, "select pg_try_advisory_xact_lock($1)", pgxlock.AdvisoryID(key)); got != want {
		t.Errorf("%q is free for SQL: %t, want %t", key, got, want)
	}
}

// Terminate ends the server's side of the connections of the Locker with that
// owner, and waits until they are gone.
func Terminate(t *testing.T, db *pgtest.DB, owner string) {
	t.Helper()
	if n := Query[int](t, db, `select count(pg_terminate_backend(pid, 60000)) from pg_stat_activity
		where datname = current_database() and application_name = 'pgxlock ' || $1`, owner); n == 0 {
		t.Fatal("there was no connection to terminate")
	}
}
