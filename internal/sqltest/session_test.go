package sqltest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// patience bounds every statement. "Never waits" is proved by a statement that
// completes while the transaction which it could wait for is open, not by its
// speed: one that does wait meets this bound.
const patience = pgtest.Patience

// session is one client. Statements go to the server as text, as from psql.
type session struct {
	t    *testing.T
	conn *pgx.Conn
	pid  uint32
	url  string
	look *session // sees what this one waits for

	spare *[]*session // gets it when it is done with
}

// connect opens a session, or takes one that another test has left, as good as new: to start one
// costs the server more than most tests here.
func connect(t *testing.T, url string) *session {
	t.Helper()
	conn := borrow(t, url)
	if conn == nil {
		conn = pgtest.Connect(t, url)
	}
	return &session{t: t, conn: conn, pid: conn.PgConn().PID(), url: url}
}

// connectAnew is connect for a session with the database's settings as they are now.
func (d *database) connectAnew() *session {
	d.t.Helper()
	conn := pgtest.Connect(d.t, d.url)
	return &session{t: d.t, conn: conn, pid: conn.PgConn().PID(), url: d.url, look: d.session}
}

// lent are the pools that sessions are borrowed from, by their databases.
var lent struct {
	sync.Mutex

	free map[string]int32 // how many more each pool has
	pool map[string]*pgxpool.Pool
}

// lend lets the test's sessions come from the pool of its database, which outlives the test.
func lend(t *testing.T, db *pgtest.DB) {
	lent.Lock()
	defer lent.Unlock()
	if lent.pool == nil {
		lent.free, lent.pool = make(map[string]int32), make(map[string]*pgxpool.Pool)
	}
	lent.free[db.URL], lent.pool[db.URL] = db.Pool.Config().MaxConns, db.Pool
	t.Cleanup(func() {
		lent.Lock()
		defer lent.Unlock()
		delete(lent.free, db.URL)
		delete(lent.pool, db.URL)
	})
}

// borrow returns a session of the pool until the test is over, or nil where there is none.
func borrow(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	lent.Lock()
	pool := lent.pool[url]
	if lent.free[url] > 0 {
		lent.free[url]--
	} else {
		pool = nil
	}
	lent.Unlock()
	if pool == nil {
		return nil
	}
	borrowed, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !renew(borrowed.Conn()) {
			_ = borrowed.Conn().Close(context.Background()) // the pool forgets it
		}
		borrowed.Release()
		lent.Lock()
		defer lent.Unlock()
		lent.free[url]++
	})
	return borrowed.Conn()
}

// renew makes a session as good as new, if it is still there and idle.
func renew(conn *pgx.Conn) bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if conn.IsClosed() || conn.PgConn().IsBusy() {
		return false
	}
	if conn.PgConn().TxStatus() != 'I' {
		if _, err := conn.Exec(ctx, "rollback"); err != nil {
			return false
		}
	}
	if err := conn.DeallocateAll(ctx); err != nil {
		return false
	}
	if _, err := conn.Exec(ctx, "discard all"); err != nil {
		return false
	}
	over, cancel := context.WithCancel(ctx)
	cancel() // what was heard is returned all the same
	for {
		if _, err := conn.WaitForNotification(over); err != nil {
			return !conn.IsClosed()
		}
	}
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// begin begins a transaction, and takes its snapshot above READ COMMITTED.
func (s *session) begin(level string) {
	s.t.Helper()
	s.do("begin isolation level " + level + "; select 1")
}

func (s *session) commit() {
	s.t.Helper()
	s.do("commit")
}

func (s *session) rollback() {
	s.t.Helper()
	s.do("rollback")
}

// done rolls back what is open, and leaves the session to the next one that connects.
func (s *session) done() {
	s.t.Helper()
	if s.conn.PgConn().TxStatus() != 'I' {
		s.rollback()
	}
	if s.spare != nil {
		*s.spare = append(*s.spare, s)
	}
}

// run runs statements.
func (s *session) run(sql string) error {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	_, err := s.conn.PgConn().Exec(ctx, sql).ReadAll()
	return err
}

// do runs statements that must not fail.
func (s *session) do(sql string) {
	s.t.Helper()
	if err := s.run(sql); err != nil {
		s.t.Fatalf("%v\n%s", err, sql)
	}
}

// get returns the value of an expression that must not fail.
func (s *session) get(expression string) string {
	s.t.Helper()
	v, err := s.query(expression)
	if err != nil {
		s.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

// number is get for whole numbers.
func (s *session) number(expression string) (n int64) {
	s.t.Helper()
	if _, err := fmt.Sscan(s.get(expression), &n); err != nil {
		s.t.Fatalf("%s: %v", expression, err)
	}
	return n
}

// outcome returns the value of an expression, or the SQLSTATE if it fails.
func (s *session) outcome(expression string) string {
	return outcome(s.query(expression))
}

// want checks the outcome of an expression: a value, a SQLSTATE, or one of
// several with | between them.
func (s *session) want(expression, want string) {
	s.t.Helper()
	if got := s.outcome(expression); !oneOf(got, want) {
		s.t.Errorf("%s: got %s, want %s", expression, got, want)
	}
}

// query returns the value of an expression as text.
func (s *session) query(expression string) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	results, err := s.conn.PgConn().Exec(ctx, "select ("+expression+")::text").ReadAll()
	if err != nil {
		return "", err
	}
	if len(results[0].Rows) != 1 || results[0].Rows[0][0] == nil {
		return "NULL", nil
	}
	return string(results[0].Rows[0][0]), nil
}

func outcome(value string, err error) string {
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return value
	case errors.As(err, &pgErr):
		return pgErr.Code
	default:
		return err.Error() // it waited until its context ended, for one
	}
}

func oneOf(got, want string) bool {
	for w := range strings.SplitSeq(want, "|") {
		if got == w {
			return true
		}
	}
	return false
}

// call is an expression that runs while the test goes on.
type call struct {
	s    *session
	look *session // sees what it waits for
	done chan struct{}
	got  string
}

// start starts an expression.
func (s *session) start(expression string) *call {
	s.t.Helper()
	if s.look == nil || s.look == s {
		s.look = connect(s.t, s.url)
	}
	return s.startBefore(s.look, expression)
}

// startBefore is start where there is a session already that can look on.
func (s *session) startBefore(look *session, expression string) *call {
	c := &call{s: s, look: look, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.got = s.outcome(expression)
	}()
	return c
}

// outcome waits for the end and returns what came of it.
func (c *call) outcome() string {
	<-c.done
	return c.got
}

func (c *call) want(want string) {
	c.s.t.Helper()
	if got := c.outcome(); !oneOf(got, want) {
		c.s.t.Errorf("got %s, want %s", got, want)
	}
}

// waitsFor returns when the call waits for the other session.
func (c *call) waitsFor(other *session) {
	c.s.t.Helper()
	// The server notes when the wait began a moment after it shows the wait.
	if !c.waits(fmt.Sprintf("%d = any (pg_blocking_pids(%d)) and exists (select from pg_locks where pid = %[2]d and waitstart is not null)", other.pid, c.s.pid)) {
		c.s.t.Fatalf("it waits for nobody, but returned %s", c.got)
	}
}

// waitsOrEnds says whether the call waits for any other session.
func (c *call) waitsOrEnds() bool {
	c.s.t.Helper()
	return c.waits(fmt.Sprintf("cardinality(pg_blocking_pids(%d)) > 0", c.s.pid))
}

func (c *call) waits(condition string) bool {
	c.s.t.Helper()
	for {
		select {
		case <-c.done: // at the latest when its context ends
			return false
		default:
		}
		if c.look.get(condition) == "true" {
			return true
		}
	}
}

// leavesNothing checks that the open transaction of a session has neither a
// transaction id, nor a row lock (which would have taken one), nor an advisory
// lock, and waits for none.
func (d *database) leavesNothing(s *session) {
	d.t.Helper()
	if xid := s.get("pg_current_xact_id_if_assigned()"); xid != "NULL" {
		d.t.Errorf("it drew the transaction id %s", xid)
	}
	if held := d.locks(s); held != "NULL" {
		d.t.Errorf("it keeps %s", held)
	}
}

// locks lists what a session has locked, or waits for, but tables, and what it
// has read in SERIALIZABLE. Row locks do not show here, only waits for them.
func (d *database) locks(s *session) string {
	d.t.Helper()
	return d.get(fmt.Sprintf(`select string_agg(concat_ws(' ', locktype, mode), ', ') from pg_locks
		where pid = %d and locktype not in ('relation', 'virtualxid', 'transactionid') and mode <> 'SIReadLock'`, s.pid))
}

// token acquires a lease that must be free, and returns its fencing token. The lease
// lasts longer than any test.
func (s *session) token(lock, holder string) int64 {
	s.t.Helper()
	return s.number(fmt.Sprintf("(try_acquire_lock(%s, %s, '1 h')).fencing_token", quote(lock), quote(holder)))
}

// await returns when the expression is true.
func await(t *testing.T, d *database, expression string) {
	t.Helper()
	pgtest.Until(t, expression, func() bool { return d.get(expression) == "true" })
}
