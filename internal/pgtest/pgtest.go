// Package pgtest gives each test a database of its own on a real PostgreSQL
// server. It is the one way in which the project's tests get to a server.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		db := pgtest.New(t)
//		db.Exec(t, "create table ...")
//		use(db.Pool)
//	}
//
// package choose says which server that is. If there is none, tests fail: a
// lock that was tried against nothing was not tried.
package pgtest

import (
	"context"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Patience bounds each wait of a test. No wait of a correct program comes near it, however slow
// and busy the machine is: it turns a hang into a message, and measures nothing.
const Patience = 15 * time.Minute

// Long skips the test in a run with -short, which is what make test does; make test-all runs it.
// A test is long if users and each commit can do without it: it repeats, it needs servers of its
// own, or another test holds the same contract.
func Long(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.Skip("make test-all runs it")
	}
}

// DB is a database that one test has for itself, as good as new.
type DB struct {
	Pool *pgxpool.Pool // with pgx's defaults
	URL  string        // connection string, for callers that need one
	Name string        // the database's name
}

// New gives the test an empty database. When the test and its subtests are over, sessions that are
// still connected to it are ended, and it is cleaned for the next test, or dropped.
func New(tb testing.TB) *DB {
	tb.Helper()
	return empty.New(tb)
}

var empty = NewTemplate(func(context.Context, *pgxpool.Pool) error { return nil })

// Pool connects a pool to the given connection string, closed when the test is
// over. Each of configure may change the pool's configuration first.
func Pool(tb testing.TB, url string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	tb.Helper()
	pool := newPool(tb, url, configure...)
	tb.Cleanup(func() { closePool(tb, pool) })
	return pool
}

func newPool(tb testing.TB, url string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	tb.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		tb.Fatalf("pgtest: pool: %v", err)
	}
	for _, f := range configure {
		f(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config) // connects when it is used first
	if err != nil {
		tb.Fatalf("pgtest: pool: %v", err)
	}
	return pool
}

// closePool closes the pool, which waits for all its connections to come back:
// a test that lost one should hear of it, not hang.
func closePool(tb testing.TB, pool *pgxpool.Pool) {
	tb.Helper()
	if err := awaitReturned(pool); err != nil {
		tb.Errorf("pgtest: %v", err)
		return
	}
	pool.Close()
}

// NewPool connects another pool to the database, closed when the test is over, as
// another instance of a program would have.
func (db *DB) NewPool(tb testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	tb.Helper()
	return Pool(tb, db.URL, configure...)
}

// Connect opens a connection of its own to the database, closed when the test
// is over.
func (db *DB) Connect(tb testing.TB) *pgx.Conn {
	tb.Helper()
	return Connect(tb, db.URL)
}

// Connect opens a connection, closed when the test is over.
func Connect(tb testing.TB, url string) *pgx.Conn {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		tb.Fatalf("pgtest: connect: %v", err)
	}
	tb.Cleanup(func() {
		// The test's own context is done by now. The test may have cut the
		// connection, so an error here says nothing.
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

// Exec runs SQL in the database, and fails the test if that fails. Without
// arguments, sql may be several statements.
func (db *DB) Exec(tb testing.TB, sql string, args ...any) pgconn.CommandTag {
	tb.Helper()
	tag, err := db.Pool.Exec(tb.Context(), sql, args...)
	if err != nil {
		tb.Fatalf("pgtest: %v\n%s", err, sql)
	}
	return tag
}

// Receive waits for a value that another goroutine sends, or for the end of the channel.
func Receive[T any](tb testing.TB, what string, channel <-chan T) T {
	tb.Helper()
	select {
	case v := <-channel:
		return v
	case <-time.After(Patience):
		tb.Fatalf("not within %s: %s", Patience, what)
		panic("unreachable")
	}
}

// Until waits for something that another goroutine, process or server will do. It checks so
// seldom that the processors are left to what it waits for.
func Until(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	const least, most, longest = time.Millisecond, 20 * time.Millisecond, 200 * time.Millisecond
	limit := time.Now().Add(Patience)
	for pause := least; ; pause = min(2*pause, most) {
		looked := time.Now()
		if done() {
			return
		}
		if looked.After(limit) {
			tb.Fatalf("not within %s: %s", Patience, what)
		}
		time.Sleep(min(max(pause, 5*time.Since(looked)), longest))
	}
}

// Soak returns short, or long in a run of make soak, or what lies between them
// where that runs a part of its rounds: how often a test rolls its dice. Such a
// test has a name that begins with TestSoak, by which make soak finds it, and is a [Long] one.
func Soak[T any](tb testing.TB, short, long T) T {
	tb.Helper()
	if !strings.HasPrefix(tb.Name(), "TestSoak") {
		tb.Fatalf("pgtest: make soak runs the tests whose name begins with TestSoak: %s would be left out", tb.Name())
	}
	Long(tb)
	part := soakPart()
	if part == 0 {
		return short
	}
	result := reflect.ValueOf(&long).Elem()
	if result.CanInt() {
		from := reflect.ValueOf(short).Int()
		result.SetInt(from + int64(part*float64(result.Int()-from)))
	}
	return long
}

// soakPart is the part of its rounds that a soak test runs, 0 outside of make soak.
func soakPart() float64 {
	set := os.Getenv("PGXLOCK_SOAK")
	if set == "" {
		return 0
	}
	part, err := strconv.ParseFloat(set, 64)
	if err != nil || part <= 0 || part > 1 {
		panic("PGXLOCK_SOAK is " + strconv.Quote(set) + "; set it to the part of the rounds to run, from 0.01 to 1")
	}
	return part
}
