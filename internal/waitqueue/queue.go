package waitqueue

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A Queue is the callers of one Locker that wait. Without Connect it serves a Locker that has
// no server: such callers have local queues and no tickets. It implements [hold.Queue].
type Queue struct {
	config   Config
	server   Server
	listener *listener

	publishing  batcher.Batcher[lockkey.Name] // of the local queue; it has each name once: those in queued
	withdrawing batcher.Batcher[*ticket]
	waking      batcher.Batcher[wakeUp]
	asking      batcher.Batcher[lockkey.Name] // advisory locks whose holders are notified
	trying      batcher.Batcher[*ticket]      // tickets whose tries were refused
	checking    batcher.Batcher[*ticketCheck] // for tries that want to share

	count atomic.Int32 // of local queues; most calls read 0 here and skip the mutex
	seen  atomic.Bool  // others has entries

	client atomic.Int64 // the number under which the listener listens; 0: it does not. Written under mu

	// mu guards what follows, the local queues with their positions, and the tickets. It is held
	// for work in memory only: no statement is sent under it, and no caller is waited for.
	mu       sync.Mutex
	locals   map[lockkey.Name]*localQueue
	waiting  lockkey.Known[lockkey.Name] // those that have local queues
	tickets  map[*ticket]struct{}
	handed   map[lockkey.Name]struct{} // advisory locks that callers here handed over since checked
	checked  time.Time
	sending  map[lockkey.Name]struct{}  // of tickets in flight, whose new numbers are not known yet
	leaving  map[int64]struct{}         // numbers of tickets that are to be removed from the table
	removing map[lockkey.Name]int       // tickets that are about to be removed: a wake-up follows each removal
	void     map[lockkey.Name][]*ticket // tickets that are over, until their removal was tried
	others   map[lockkey.Name]time.Time // when other processes were last seen to have an advisory lock, or to wait for it
	forget   int                        // the size of others at which old entries are removed
	queued   map[lockkey.Name]struct{}  // of tickets that are to be published, or refreshed
	woken    map[lockkey.Name]wokenTicket
	looking  map[lockkey.Name]*dueLook // of locks whose wake-ups found nobody
	unheard  unheardGrant              // the last one that was recorded
	timer    *time.Timer               // refreshes all tickets
	failing  bool                      // the last try to publish tickets failed
	closed   bool
}

// A Config is what a Queue knows of its Locker.
type Config struct {
	Closing context.Context // ends when callers of the Locker wait no longer
	Holds   *hold.Group     // of the Locker
	Backoff func(attempt int) time.Duration
	Log     *slog.Logger
}

// A Server is where the tickets are, and who else hears of notifications.
type Server struct {
	Owner   string
	Place   *dbconn.Installation
	Runner  Runner
	Dialer  dbconn.Dialer // for the listener
	Session LockSession   // nil: there is none
	Leaders Leaders
}

// A Runner runs exchanges on a connection of the Locker.
type Runner interface {
	Do(dbconn.Exchange) error

	// Reached reports whether the last one got an answer.
	Reached() bool
}

// A LockSession has the advisory locks of this process.
type LockSession interface {
	// Had reports whether the session has the lock, or had it so lately that a notification of a
	// waiter may still be on its way. It takes no mutex.
	Had(id lockkey.ID) bool

	// Wanted is called when other processes wait for one of the locks.
	Wanted(name lockkey.Name)

	// WakesOnRelease reports whether the session has the lock exclusively, and the release will wake
	// the first waiter.
	WakesOnRelease(id lockkey.ID) bool

	// Evicted is called when an operator may have evicted the holder of one of them.
	Evicted()

	// Unpublished returns keys, of names, of locks that operators should see and cannot yet.
	Unpublished() []string
}

// Leaders are the leaders of one Locker.
type Leaders interface {
	// Look checks, in the background, whether any was asked to step down.
	Look()

	// Any reports whether there is one. It is called without the mutexes of the Queue, because
	// the Leaders call the Queue while they hold theirs.
	Any() bool
}

// New returns a Queue without a server.
func New(c Config) *Queue { return &Queue{config: c} }

// Connect gives the Queue a server, before its first use.
func (q *Queue) Connect(s Server) {
	q.server = s
	q.tickets, q.queued, q.sending = make(map[*ticket]struct{}), make(map[lockkey.Name]struct{}), make(map[lockkey.Name]struct{})
	q.leaving, q.removing, q.void = make(map[int64]struct{}), make(map[lockkey.Name]int), make(map[lockkey.Name][]*ticket)
	q.handed, q.others, q.woken = make(map[lockkey.Name]struct{}), make(map[lockkey.Name]time.Time), make(map[lockkey.Name]wokenTicket)
	q.looking = make(map[lockkey.Name]*dueLook)
	q.listener = newListener(s.Dialer, q)
	q.publishing = batcher.Batcher[lockkey.Name]{Limit: batcher.MaxRows, Run: q.publish, Fail: q.unsent}
	q.withdrawing = batcher.Batcher[*ticket]{Limit: batcher.MaxRows, Run: q.withdraw, Fail: func(batch []*ticket, _ error) { q.withdrawLater(batch) }}
	q.waking = batcher.Batcher[wakeUp]{Limit: batcher.MaxRows, Run: q.wake, Fail: func([]wakeUp, error) {}}
	q.asking = batcher.Batcher[lockkey.Name]{Limit: batcher.MaxRows, Run: q.notifyHolders, Fail: func([]lockkey.Name, error) {}}
	q.trying = batcher.Batcher[*ticket]{Limit: batcher.MaxRows, Run: q.tried, Fail: q.unrecorded}
	q.checking = batcher.Batcher[*ticketCheck]{Limit: batcher.MaxRows, Run: q.check, Fail: func(batch []*ticketCheck, _ error) { settleChecks(batch, nil) }}
}

// installed reports whether there is a table for tickets, as far as is known.
func (q *Queue) installed() bool { return q.server.Place != nil && q.server.Place.Installed() }

// Listen implements [hold.Queue].
func (q *Queue) Listen(pid int32) { q.listener.listenFor(pid) }

// StartListener makes the listener run for the leaders, of which there is one by now.
func (q *Queue) StartListener() { q.listener.start() }

// Listening reports whether the listener receives notifications.
func (q *Queue) Listening() bool { return q.client.Load() != 0 }

// Reap removes tickets of processes that died, of locks that no other process tried for since.
func (q *Queue) Reap() error { return q.send(statements.QueueReap) }

// send runs a statement without a result.
func (q *Queue) send(statement statements.Name, args ...any) error {
	return q.server.Runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) error {
		rows := c.Query(ctx, q.server.Place.Statement(statement), args...)
		rows.Close()
		return rows.Err()
	})
}

// Close ends the traffic. The last waiter must have gone.
func (q *Queue) Close() {
	q.mu.Lock()
	q.closed = true
	if q.timer != nil {
		q.timer.Stop()
	}
	q.mu.Unlock()
	<-q.publishing.Done()
	<-q.withdrawing.Done()
	<-q.asking.Done()
	<-q.trying.Done()
	<-q.checking.Done()
	<-q.waking.Done()
	q.listener.stop()
}
