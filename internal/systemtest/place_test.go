package systemtest_test

import (
	"errors"
	"net"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/once"
)

// wantSchemaError checks that a call ended with ErrSchema, and that the message
// says what to run and names what the reader has to know.
func wantSchemaError(t *testing.T, err error, words ...string) {
	t.Helper()
	if !errors.Is(err, pgxlock.ErrSchema) || errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatalf("%v, want ErrSchema", err)
	}
	for _, word := range append(words, "migrations.Up", "pgxlock migrate up") {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the message does not say %q: %v", word, err)
		}
	}
}

// install runs the migrations in a schema.
func install(t *testing.T, db *pgtest.DB, schema string) {
	t.Helper()
	if err := migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: schema}); err != nil {
		t.Fatalf("schema %q: %v", schema, err)
	}
}

// withPath returns the database as a role sees it whose search_path is that.
func withPath(t *testing.T, db *pgtest.DB, path string) *pgtest.DB {
	t.Helper()
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = path })
	return &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

// useLock acquires, renews, fences and releases, which must all work.
func useLock(t *testing.T, locks *pgxlock.Locker, pool *pgxpool.Pool, key string) {
	t.Helper()
	lock := testkit.Acquire(t, locks, key)
	if err := lock.Renew(t.Context()); err != nil {
		t.Errorf("Renew: %v", err)
	}
	err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		return lock.Fence(t.Context(), tx)
	})
	if err != nil {
		t.Errorf("Fence: %v", err)
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Errorf("Release: %v", err)
	}
}

func TestMissingInstallationIsReportedAndFoundOnceItIsThere(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		before string // file or statement
		schema string
		says   string
	}{
		"nothing at all":             {says: "has no pgxlock"},
		"only the functions of old":  {before: "../../testdata/seed.sql", says: `schema "public" are older`},
		"a schema without pgxlock":   {before: `create schema "Empty"`, schema: "Empty", says: `schema "Empty" has no pgxlock`},
		"a schema with those of old": {before: "../../testdata/seed.sql", schema: "public", says: `schema "public" has no pgxlock`},
		"a schema that is not there": {schema: "nowhere", says: `schema "nowhere" has no pgxlock`},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "nothing at all" {
				pgtest.Long(t)
			}
			t.Parallel()
			db := pgtest.New(t)
			sql := test.before
			if strings.HasSuffix(sql, ".sql") {
				file, err := os.ReadFile(sql)
				if err != nil {
					t.Fatal(err)
				}
				sql = string(file)
			}
			db.Exec(t, sql)
			locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Schema: test.schema})
			for range 2 { // on a first connection, and on whatever is there then
				_, err := locks.Acquire(t.Context(), "k")
				wantSchemaError(t, err, test.says)
			}
			_, err := locks.TryAcquire(t.Context(), "k")
			wantSchemaError(t, err, test.says)

			install(t, db, test.schema)
			useLock(t, locks, db.Pool, "k")
		})
	}
}

func TestOfTwoInstallationsTheOneOnTheSearchPathIsUsed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	install(t, db, "one")
	install(t, db, "two")
	for path, schema := range map[string]string{
		"one": "one", "two": "two", "two, one": "two", "public, one": "one",
	} {
		locks := testkit.NewLocker(t, withPath(t, db, path), nil)
		key := "path " + path
		lock := testkit.Acquire(t, locks, key)
		for _, s := range []string{"one", "two"} {
			there := testkit.Query[bool](t, db, "select exists (select from "+s+".distributed_locks where lock_name = $1)", key)
			if there != (s == schema) {
				t.Errorf("search_path %s: in schema %s: %t, want it in %s", path, s, there, schema)
			}
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}

	// The two do not exclude each other, so that to guess would be no lock.
	_, err := testkit.NewLocker(t, db, nil).Acquire(t.Context(), "k")
	wantSchemaError(t, err, "one", "two", "search_path", "LeaseConfig.Schema")
	for _, retry := range []bool{false, true} { // before a Locker of leases is asked
		_, err := runnerOn(t, db, age, &once.Config{Retry: retry}).DoAt(t.Context(), "k", time.Now().Round(time.Second), new(job).run)
		wantSchemaError(t, err, "one", "two", "search_path", "once.Config.Schema")
	}
	useLock(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Schema: "two"}), db.Pool, "k")

	// What the configuration names counts, whatever the search_path says.
	named := testkit.Acquire(t, testkit.NewLocker(t, withPath(t, db, "one"), &pgxlock.LeaseConfig{Schema: "two"}), "named")
	if holder := testkit.Query[string](t, db, "select holder_id from two.distributed_locks where lock_name = 'named'"); holder != named.Holder() {
		t.Errorf("held by %q, want %q", holder, named.Holder())
	}
}

func TestSingleInstallationIsFoundOffTheSearchPath(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	install(t, db, "elsewhere")
	for _, path := range []string{"public", "", "no_such_schema", "pg_catalog"} {
		through := withPath(t, db, path)
		useLock(t, testkit.NewLocker(t, through, nil), through.Pool, "k")
	}
}

// SQL callers lock by what is on the path: locks in another schema would not
// exclude them.
func TestOlderInstallationOnTheSearchPathIsNotPassedOver(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	seed, err := os.ReadFile("../../testdata/seed.sql")
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(t, string(seed))
	install(t, db, "newer")
	_, err = testkit.NewLocker(t, db, nil).Acquire(t.Context(), "k")
	wantSchemaError(t, err, `schema "public" are older`)
	useLock(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Schema: "newer"}), db.Pool, "k")
}

func TestSchemasMayHaveAnyName(t *testing.T) {
	t.Parallel()
	for i, schema := range []string{`Upper "double' Näme`, "/* schema */", "$1;--", `back\slash %I`, "select", "a.b, c"} {
		t.Run(schema, func(t *testing.T) {
			if i > 0 {
				pgtest.Long(t)
			}
			t.Parallel()
			db := pgtest.New(t)
			install(t, db, schema)
			useLock(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Schema: schema}), db.Pool, "named")
			useLock(t, testkit.NewLocker(t, db, nil), db.Pool, "the only one")
			useLock(t, testkit.NewLocker(t, withPath(t, db, pgx.Identifier{schema}.Sanitize()), nil), db.Pool, "on the path")
		})
	}
}

func TestSilentHostLeavesTimeForTheNext(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel takes the connection, nobody answers
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	host := &pgconn.FallbackConfig{Host: "127.0.0.1", Port: uint16(silent.Addr().(*net.TCPAddr).Port)}
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: db.NewPool(t, testkit.Behind(host), func(c *pgxpool.Config) { c.ConnConfig.ConnectTimeout = 5 * time.Second }), URL: db.URL, Name: db.Name}, nil)
	testkit.UntilConnected(t, locks)
	useLock(t, locks, db.Pool, "k")
}

// The doctor finds the schemas on a connection that prefers indexes, as its other checks need it.
func TestManySchemasAreFoundInOneReadOfEachCatalog(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `do $$ begin for i in 1..50 loop
		execute format('create schema tenant%s create table pgxlock_claims (i int)', i);
		execute format('create function tenant%s.pgxlock_version() returns bigint language sql return 8::bigint', i);
		execute format('create function tenant%s.acquire_lock(varchar, varchar, integer, jsonb) returns boolean language sql return true', i);
	end loop; end $$`)
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	defer testkit.Rollback(t, tx)
	for _, settings := range []string{"", "set local enable_seqscan = off; set local enable_indexscan = off; set local enable_indexonlyscan = off; set local jit = off"} {
		if _, err := tx.Exec(t.Context(), settings); err != nil {
			t.Fatal(err)
		}
		rows, err := tx.Query(t.Context(), "explain (analyze, costs off, timing off) "+place.LookSQL, pgx.QueryExecModeSimpleProtocol, "")
		if err != nil {
			t.Fatal(err)
		}
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		for _, node := range plan {
			if regexp.MustCompile(` on (pg_proc p|pg_class c(_\d+)?) `).MatchString(node) && !strings.Contains(node, "loops=1)") {
				t.Errorf("with %q it reads %s", settings, strings.TrimSpace(node))
			}
		}
		if t.Failed() {
			t.Log(strings.Join(plan, "\n"))
		}
	}
}
