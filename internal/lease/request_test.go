package lease

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// These tests hand batches of requests to a lease table themselves, so that they say
// what goes together, and lose an answer.

// batchDB is a database of which batches are tested.
type batchDB struct{ *pgtest.DB }

func newBatchDB(t *testing.T) batchDB {
	t.Helper()
	return batchDB{migrated.New(t)}
}

var migrated = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Up(ctx, pool, nil) })

// table returns a Table whose connections are made as the pool says.
func (db batchDB) table(t *testing.T, pool *pgxpool.Pool) *Table {
	t.Helper()
	return newTable(t, pool, Config{TTL: time.Hour})
}

func newTable(t *testing.T, pool *pgxpool.Pool, cfg Config) *Table {
	t.Helper()
	cfg.Owner, cfg.Renew, cfg.Margin = "me", cfg.TTL/3, cfg.TTL/10
	table := New(pool.Config(), cfg)
	table.Use(hold.Host{Clock: clock.System, Closing: context.Background(), Log: slog.New(slog.DiscardHandler), Queue: noQueue{}})
	t.Cleanup(func() {
		if err := table.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return table
}

// noQueue is the queue of callers that never wait.
type noQueue struct{ hold.Queue }

func (noQueue) HandOver(lockkey.Name, hold.Release) bool           { return false }
func (noQueue) Freed(lockkey.Name) bool                            { return false }
func (noQueue) Wake([]lockkey.Name)                                {}
func (noQueue) WakeOn(func(dbconn.Exchange) error, []lockkey.Name) {}
func (noQueue) Reap() error                                        { return nil }
func (noQueue) Close()                                             {}

// An owner is the Lock of a hold here.
type owner struct{}

func (owner) Ended(why error, _ time.Duration) error { return why }
func (owner) Renewed(error)                          {}
func (owner) Close(context.Context) error            { return nil }

// newHold returns a hold that is not asked for yet.
func newHold(t *Table, key string) *hold.Hold {
	h := &hold.Hold{}
	(&hold.Group{Clock: t.host.Clock, Backend: t}).Begin(h, owner{}, key, lockkey.Name{Key: key})
	return h
}

// try asks once for a lease, as TryAcquire does, and admits what is granted.
func try(t *testing.T, table *Table, key string) (*hold.Hold, error) {
	t.Helper()
	attempts := []hold.Attempt{{Hold: newHold(table, key)}}
	table.Try(t.Context(), hold.Request{TTL: table.cfg.TTL, Turn: hold.Turn{SkipQueue: true}}, attempts)
	if err := attempts[0].Err; err != nil {
		return nil, err
	}
	return attempts[0].Hold, attempts[0].Hold.Admit()
}

// held returns who has what.
func (db batchDB) held(t *testing.T) map[string]string {
	t.Helper()
	held := make(map[string]string)
	rows, _ := db.Pool.Query(t.Context(), "select lock_name, holder_id from distributed_locks") // the rows carry the error
	var name, holder string
	if _, err := pgx.ForEachRow(rows, []any{&name, &holder}, func() error { held[name] = holder; return nil }); err != nil {
		t.Fatal(err)
	}
	return held
}

func (db batchDB) wantHeld(t *testing.T, what string, locks ...*hold.Hold) {
	t.Helper()
	want := make(map[string]string)
	for _, lock := range locks {
		want[lock.Key] = lock.Holder
	}
	if got := db.held(t); !maps.Equal(got, want) {
		t.Errorf("%sheld are %v, want %v", what, got, want)
	}
}

// rename gives a function another name.
func (db batchDB) rename(ctx context.Context, from, to string) error {
	var statement string
	err := db.Pool.QueryRow(ctx, "select format('alter function %s rename to %I', p.oid::regprocedure, $2::text) from pg_proc p where proname = $1", from, to).Scan(&statement)
	if err == nil {
		_, err = db.Pool.Exec(ctx, statement)
	}
	return err
}

func requested(t *Table, key string) *request {
	h := newHold(t, key)
	h.Holder, h.TTL, h.Margin = "holder of "+key, time.Hour, time.Second
	return &request{lock: h, Future: batcher.NewFuture()}
}

// askFor hands over a batch, and waits until each request of it has its answer.
func askFor(t *testing.T, table *Table, requests ...*request) {
	t.Helper()
	table.acquire(requests)
	for _, r := range requests {
		answered(t, r.Answered())
	}
}

func answered(t *testing.T, done <-chan struct{}) {
	t.Helper()
	pgtest.Receive(t, "the answer of an entry", done)
}

// take takes locks, alone.
func take(t *testing.T, table *Table, keys ...string) (locks []*hold.Hold) {
	t.Helper()
	var requests []*request
	for _, key := range keys {
		requests = append(requests, requested(table, key))
	}
	askFor(t, table, requests...)
	for _, r := range requests {
		if r.Err() != nil {
			t.Fatalf("%s: %v", r.lock.Key, r.Err())
		}
		locks = append(locks, r.lock)
	}
	return locks
}

func wantGranted(t *testing.T, r *request) {
	t.Helper()
	if r.Err() != nil || r.lock.Token == 0 {
		t.Errorf("the request for %s: token %d, %v", r.lock.Key, r.lock.Token, r.Err())
	}
}

// eachWay runs the test on a connection that leads to the server, and on one that
// seems to lead to a pooler. Batches through wires that were sent before are known.
func eachWay(t *testing.T, test func(t *testing.T, db batchDB, w *wires, table *Table)) {
	t.Helper()
	ways := map[string]bool{"direct": false}
	if !testing.Short() {
		ways["pooled"] = true
	}
	for name, pooled := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newBatchDB(t)
			w := &wires{pooled: pooled}
			table := db.table(t, w.pool(t, db.DB))
			take(t, table, "warm")
			db.Exec(t, "delete from distributed_locks")
			if table.requests.Direct == pooled {
				t.Fatalf("the connection is direct: %t", !pooled)
			}
			test(t, db, w, table)
		})
	}
}

// wires are connections that lose what is sent or answered.
type wires struct {
	pooled bool // the server process is not the one that was announced

	mu        sync.Mutex
	key       []byte       // what the message contains that is to be lost; nil: none
	answers   int          // how many messages of the answer come through; -1: the request is lost
	warn      bool         // instead, a warning comes before the answer: the commit was not replicated
	cut       bool         // it happened
	all       bool         // there were no more messages than came through
	reconnect func() error // before the next connection is used
}

func (w *wires) pool(t *testing.T, db *pgtest.DB) *pgxpool.Pool {
	return db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
			return &wireConn{Conn: conn, wires: w}, err
		}
		c.AfterConnect = func(context.Context, *pgx.Conn) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if !w.cut || w.reconnect == nil {
				return nil
			}
			defer func() { w.reconnect = nil }()
			return w.reconnect()
		}
	})
}

// leaveUnreplicated makes the server say that a message with that key was not replicated.
func (w *wires) leaveUnreplicated(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.key, w.warn = []byte(key), true
}

// unreplicated is the server's warning.
func unreplicated() []byte {
	b, _ := (&pgproto3.NoticeResponse{SeverityUnlocalized: "WARNING", Code: "01000", Message: "canceling wait for synchronous replication due to user request", Routine: "SyncRepWaitForLSN"}).Encode(nil)
	return b
}

// lose cuts the connection when a message with that key is sent.
func (w *wires) lose(key string, answers int, reconnect func() error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.key, w.answers, w.cut, w.all, w.reconnect = []byte(key), answers, false, false, reconnect
}

type wireConn struct {
	net.Conn
	wires *wires
	ready []byte // of the answer, not yet read
	lose  bool   // the answer to what was sent
	warn  atomic.Bool
	ended atomic.Bool
}

func (c *wireConn) Write(b []byte) (int, error) {
	c.wires.mu.Lock()
	defer c.wires.mu.Unlock()
	if c.wires.key != nil && bytes.Contains(b, c.wires.key) {
		c.wires.key = nil
		if c.wires.warn {
			c.wires.warn = false
			c.warn.Store(true)
			return c.Conn.Write(b)
		}
		if c.wires.answers < 0 {
			c.wires.cut = true
			c.ended.Store(true)
			return len(b), c.Close()
		}
		c.lose = true
	}
	return c.Conn.Write(b)
}

func (c *wireConn) Read(b []byte) (int, error) {
	for len(c.ready) == 0 {
		if c.ended.Load() {
			return 0, io.EOF
		}
		if err := c.next(); err != nil {
			return 0, err
		}
	}
	n := copy(b, c.ready)
	c.ready = c.ready[n:]
	return n, nil
}

// next reads a message, or the answer of which something is lost: all of it, so that
// the server has done what it was asked for.
func (c *wireConn) next() error {
	m, err := c.message()
	if err != nil || !c.lose {
		if c.ready = m; c.warn.Swap(false) {
			c.ready = append(unreplicated(), m...)
		}
		return err
	}
	c.wires.mu.Lock()
	defer c.wires.mu.Unlock()
	c.wires.all = true
	for n := 0; ; n++ {
		if n < c.wires.answers {
			c.ready = append(c.ready, m...)
		} else {
			c.wires.all = false
		}
		if m[0] == 'Z' {
			break
		}
		if m, err = c.message(); err != nil {
			return err
		}
	}
	c.wires.cut = true
	c.ended.Store(true)
	return c.Close()
}

func (c *wireConn) message() ([]byte, error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(c.Conn, head); err != nil {
		return nil, err
	}
	m := make([]byte, 1+binary.BigEndian.Uint32(head[1:]))
	copy(m, head)
	_, err := io.ReadFull(c.Conn, m[5:])
	if m[0] == 'K' && c.wires.pooled {
		m[5] ^= 0x40 // of the process id
	}
	return m, err
}

func TestSpoiltRequestCostsTheOthersOfItsBatchNothing(t *testing.T) {
	t.Parallel()
	noJSON := "{"
	for name, spoil := range map[string]struct {
		statement string
		metadata  *string
		state     string
	}{
		"in its statement": {"select", &noJSON, "22P02"},
		"at the commit": {`create function spoil() returns trigger language plpgsql as $$ begin raise 'spoilt' using errcode = '22023'; end $$;
			create constraint trigger spoil after insert on distributed_locks deferrable initially deferred for each row when (new.lock_name = 'bad') execute function spoil()`, nil, "22023"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachWay(t, func(t *testing.T, db batchDB, _ *wires, table *Table) {
				db.Exec(t, spoil.statement)
				first, spoilt, last := requested(table, "first"), requested(table, "bad"), requested(table, "last")
				spoilt.metadata = spoil.metadata
				askFor(t, table, first, spoilt, last)
				wantGranted(t, first)
				wantGranted(t, last)
				if got := lockerr.SQLState(spoilt.Err()); got != spoil.state {
					t.Errorf("the spoilt one: %v", spoilt.Err())
				}
				db.wantHeld(t, "", first.lock, last.lock)
			})
		})
	}
}

func TestLostAnswerOfABatchLeavesNoLeaseThatNobodyOwns(t *testing.T) {
	t.Parallel()
	const takes, noConnection = "pgxlock_acquire_one", "no connection"
	eachWay(t, func(t *testing.T, db batchDB, w *wires, table *Table) {
		for name, hidden := range map[string]string{"asked again": "", "a connection is refused then": noConnection, "requests are refused then": takes} {
			for answers, all := -1, false; !all && (answers < 1 || !testing.Short()); answers++ {
				what := fmt.Sprintf("%s, %d messages of the answer: ", name, answers)
				next := requested(table, "next")
				w.lose("next", answers, func() error {
					switch hidden {
					case "":
						return nil
					case noConnection:
						return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: lockerr.StateNoRights}
					}
					return db.rename(context.Background(), hidden, "hidden")
				})
				askFor(t, table, next)
				w.mu.Lock()
				cut := w.cut
				all, w.cut = w.all, false
				w.mu.Unlock()
				if !cut {
					t.Fatal("nothing was lost")
				}
				table.cleaning.Wait()
				switch {
				case all || hidden == "": // the answer was known, then the connection ended; or it was asked for again
					if next.Err() != nil || next.lock.Token == 0 {
						t.Errorf("%sthe request: %v", what, next.Err())
					}
					db.wantHeld(t, what, next.lock)
				default:
					if next.Err() == nil {
						t.Errorf("%sthe request was granted", what)
					}
					db.wantHeld(t, what)
				}
				if hidden == takes && !all {
					if err := db.rename(t.Context(), "hidden", hidden); err != nil {
						t.Fatal(err)
					}
				}
				w.lose("no such key", 0, nil)
				db.Exec(t, "delete from distributed_locks")
			}
		}
	})
}

func TestRequestThatMayHaveBeenGrantedIsGivenBackThoughItIsRefusedAlone(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, w *wires, table *Table) {
		requests := []*request{requested(table, "first"), requested(table, "second")}
		w.lose("first", 0, func() error {
			_, err := db.Pool.Exec(context.Background(), `do $$ begin
				execute (select string_agg(format('alter function %s rename to before;
					create function %I(%s) returns %s language plpgsql as %L;', p.oid::regprocedure, p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
					'begin raise ''spoilt'' using errcode = ''22023''; end'), '') from pg_proc p where proname in ('pgxlock_acquire_batch', 'pgxlock_acquire_one')); end $$`)
			return err
		})
		askFor(t, table, requests...)
		for _, r := range requests {
			if lockerr.SQLState(r.Err()) != "22023" {
				t.Errorf("the request for %s: %v", r.lock.Key, r.Err())
			}
		}
		table.cleaning.Wait()
		db.wantHeld(t, "")
	})
}

func TestRequestThatMayHaveBeenGrantedIsGivenBackThoughItWasNotSentAgain(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	r := requested(table, "k")
	r.lock.Holder, r.unknown = take(t, table, "k")[0].Holder, true
	outage := errors.New("outage")
	table.failRequests([]*request{r}, outage)
	answered(t, r.Answered())
	if !errors.Is(r.Err(), outage) {
		t.Errorf("the request: %v", r.Err())
	}
	table.cleaning.Wait()
	db.wantHeld(t, "")
}

func TestLeaseTryDoesNotWaitLongForTheServer(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	resume := pgtest.Occupy(t, table.requests)
	defer resume()
	if _, err := try(t, table, "k"); !errors.Is(err, lockerr.ErrNoAnswer) || errors.Is(err, lockerr.ErrNotAcquired) {
		t.Errorf("%v: a server that does not answer is not a busy key", err)
	}
}

func TestLeaseTryEndsWhenItsLockerIsClosed(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	closing, end := context.WithCancel(context.Background())
	table.host.Closing = closing
	resume := pgtest.Occupy(t, table.requests)
	defer resume()
	end()
	attempts := []hold.Attempt{{Hold: newHold(table, "k")}}
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Patience)
	defer cancel()
	table.Try(ctx, hold.Request{TTL: time.Hour}, attempts)
	if err := attempts[0].Err; !errors.Is(err, lockerr.ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}
