package waitqueue

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// warnings counts what is logged.
type warnings struct {
	slog.Handler
	n *atomic.Int32
}

func (w warnings) Handle(context.Context, slog.Record) error { w.n.Add(1); return nil }
func (w warnings) Enabled(context.Context, slog.Level) bool  { return true }

// newListening returns a Queue whose listener connects as config says.
func newListening(config *pgxpool.Config) *Queue {
	q := newLocal()
	q.Connect(Server{Owner: "owner", Place: &dbconn.Installation{Schema: "s"}, Runner: runs(func(dbconn.Exchange) error { return lockerr.ErrClosed }), Dialer: dbconn.Dialer{Config: config}, Leaders: nobody{}})
	return q
}

func TestListenerThatFailsIsNotTriedByEachOfManyShortWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, shortWaits)
}

func shortWaits(t *testing.T) {
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	var dialed, logged atomic.Int32
	config.MaxConnIdleTime = 0
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		dialed.Add(1)
		return errors.New("too many connections")
	}
	q := newListening(config)
	q.config.Log = slog.New(warnings{n: &logged})
	for range 200 {
		p := q.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive)
		q.enter(p.local)
		p.leave()
		// Long enough for a listener that ends when it is not needed, although it failed.
		for limit := time.Now().Add(2 * time.Millisecond); q.listener.work.Busy() && time.Now().Before(limit); {
			time.Sleep(100 * time.Microsecond)
		}
	}
	if n := dialed.Load(); n > 20 {
		t.Errorf("200 waits connected %d times", n)
	}
	if n := logged.Load(); n != 1 {
		t.Errorf("that it fails was logged %d times", n)
	}
	q.listener.stop()
}

func TestListenerThatStillFailsIsLoggedEachFiveMinutes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		config, err := pgxpool.ParseConfig("")
		if err != nil {
			t.Fatal(err)
		}
		config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { return errors.New("too many connections") }
		q := newListening(config)
		var log bytes.Buffer
		q.config.Log = slog.New(slog.NewTextHandler(&log, nil))
		began := time.Now()
		p := q.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive)
		q.enter(p.local)
		time.Sleep(3*reportEvery + 3*time.Minute) // each report waits for the next failure, up to clock.MaxListenDelay later
		p.leave()
		q.listener.stop()
		synctest.Wait()
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 4 || strings.Contains(lines[0], "failures=") {
			t.Fatalf("%d lines: %s", len(lines), log.String())
		}
		for _, line := range lines[1:] {
			if !regexp.MustCompile(`failures=\d+ since=`+began.Format("2006-01-02T15:04")).MatchString(line) || !strings.Contains(line, "too many connections") {
				t.Errorf("%s", line)
			}
		}
	})
}

func TestListenerThatWasNeededBetweenItsLooksIsNotIdle(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConnIdleTime = time.Hour
	q := newListening(config)
	listener := q.listener
	listener.running = true // as far as start knows: the test is the goroutine that listens
	listener.needed = time.Now().Add(-2 * time.Hour)
	p := q.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive)
	q.enter(p.local)
	p.leave()
	if listener.idle() {
		t.Error("it is idle, although a call has just waited")
	}
}

func TestListenerLooksWhetherLeadersWereAskedToStepDownWhileItDidNotListen(t *testing.T) {
	t.Parallel()
	leader := &someone{looked: make(chan struct{}, 10)}
	leader.leads.Store(true)
	q := connected(t, newDB(t), leader)
	q.StartListener()
	pgtest.Receive(t, "the leader looks when it listens", leader.looked)
}

// levels passes on the levels of what is logged.
type levels struct {
	slog.Handler
	to chan slog.Level
}

func (l levels) Handle(_ context.Context, r slog.Record) error { l.to <- r.Level; return nil }
func (l levels) Enabled(context.Context, slog.Level) bool      { return true }

func TestListenerLogsThatItIsBack(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	leader := &someone{looked: make(chan struct{}, 10)}
	leader.leads.Store(true)
	q := connected(t, db, leader)
	logged := make(chan slog.Level, 10)
	q.config.Log = slog.New(levels{to: logged})
	q.StartListener()
	pgtest.Receive(t, "it listens", leader.looked)
	for range 2 {
		db.Exec(t, "select pg_terminate_backend(pid) from pg_locks join pg_database d on d.oid = database where locktype = 'advisory' and datname = current_database()")
		if level := pgtest.Receive(t, "it has ended", logged); level != slog.LevelWarn {
			t.Errorf("its end was logged as %s", level)
		}
		if level := pgtest.Receive(t, "it is back", logged); level != slog.LevelInfo {
			t.Errorf("its return was logged as %s", level)
		}
		pgtest.Receive(t, "it listens again", leader.looked)
	}
	if len(logged) > 0 {
		t.Errorf("%s was logged, too", <-logged)
	}
}

// someone is Leaders, of which there may be one.
type someone struct {
	leads  atomic.Bool
	looked chan struct{} // how often they are made to look
}

func (s *someone) Look()     { s.looked <- struct{}{} }
func (s *someone) Any() bool { return s.leads.Load() }

func TestListenerEndsOnlyIfNothingNeedsItAndNothingAskedMeanwhile(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConnIdleTime = 0
	q := newListening(config)
	listener := q.listener
	listener.running = true // as far as start knows: the test is the goroutine that listens

	needs := map[string]struct{ begin, end func() }{
		"a ticket": func() struct{ begin, end func() } {
			var p *position
			return struct{ begin, end func() }{
				func() { p = q.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive); q.enter(p.local) },
				func() { p.leave() },
			}
		}(),
		"a leader": func() struct{ begin, end func() } {
			leader := &someone{}
			q.server.Leaders = leader
			return struct{ begin, end func() }{
				func() { leader.leads.Store(true); q.StartListener() },
				func() { leader.leads.Store(false) },
			}
		}(),
		"a lock session": {func() { listener.listenFor(7) }, func() { listener.listenFor(0) }},
	}
	for name, need := range needs {
		need.begin()
		if listener.idle() {
			t.Errorf("%s: the listener is idle", name)
		}
		need.end()
		if !listener.idle() {
			t.Errorf("%s: it is over, and the listener not idle", name)
		}
		need.begin() // after the look
		if listener.ends() {
			t.Errorf("%s: the listener ends although it was asked to run", name)
		}
		need.end()
		listener.running = true
		if !listener.idle() || !listener.ends() {
			t.Errorf("%s: the listener does not end", name)
		}
		listener.running = true
	}
	listener.cancel()
	listener.running = false
	listener.start()
	if listener.running {
		t.Error("a listener that was stopped starts again")
	}
}
