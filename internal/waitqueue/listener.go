package waitqueue

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A listener receives the notifications of releases that callers here wait for. It has a
// connection of its own, from the first such wait until nothing has needed it for the pool's
// MaxConnIdleTime. Its session has an advisory lock for as long as it lives, by which others
// know that its tickets count.
//
// Where notifications do not arrive, as behind most poolers, it logs that and tries again
// later; meanwhile waiters poll. It logs its return as well.
//
// Whatever needs the listener becomes visible to [Queue.needsListener] first and calls start
// then. The listener forgets that call before it asks needsListener, and ends only if there
// was no call since. So either it sees the need, or it sees the call.
type listener struct {
	dbconn.Attempts
	queue *Queue

	stopping context.Context // ends with stop
	cancel   context.CancelFunc
	work     batcher.Background // the goroutine of run
	named    time.Time          // when names were published last
	needed   time.Time          // when the listener was last seen to be needed
	retry    time.Duration      // how long to wait after the next failure
	failures int                // in a row
	since    time.Time          // the first of them
	reported time.Time          // the last of them that was logged

	mu        sync.Mutex
	running   bool
	asked     bool               // start was called since idle last checked
	holder    int32              // the backend of the lock session, whose notifications to receive; 0: none
	interrupt context.CancelFunc // ends the wait for a notification; nil: there is none
}

// errIdle means that nothing needs the listener any more.
var errIdle = errors.New("nothing needs the listener")

const (
	// listenPing is how long the session may be silent before a ping checks it.
	listenPing = 5 * time.Second

	// firstListenRetry is how long to wait after the first failure. Each further one doubles
	// that, up to clock.MaxListenDelay.
	firstListenRetry = 100 * time.Millisecond

	// reportEvery is how often it is logged that the listener still fails.
	reportEvery = 5 * time.Minute
)

func newListener(d dbconn.Dialer, q *Queue) *listener {
	l := &listener{Attempts: dbconn.Attempts{Dialer: d}, queue: q, retry: firstListenRetry}
	l.stopping, l.cancel = context.WithCancel(context.Background())
	return l
}

// start makes the listener run. The caller has made its need visible to needsListener before.
func (l *listener) start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = true
	if !l.running && l.stopping.Err() == nil {
		l.running = true
		l.work.Run(l.run)
	}
}

// stop returns when the connection is closed. The listener does not start again.
func (l *listener) stop() {
	l.mu.Lock()
	l.cancel()
	l.mu.Unlock()
	l.work.Wait()
}

// idle reports whether nothing has needed the listener for long enough.
func (l *listener) idle() bool {
	l.mu.Lock()
	asked, holder := l.asked, l.holder
	l.asked = false
	l.mu.Unlock()
	if asked { // it was needed since the last check, which may be long ago
		l.needed = time.Now()
	}
	if holder != 0 || l.queue.needsListener() {
		l.needed = time.Now()
		return false
	}
	return time.Since(l.needed) >= l.Config.MaxConnIdleTime
}

// ends reports whether run may return: start was not called since the last check. The next
// start then runs the listener again. The connection is closed by now.
func (l *listener) ends() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked {
		return false
	}
	l.running = false
	return true
}

// run listens until nothing needs the listener. After a failure it pauses even if nothing does,
// and the next run keeps what this one knows of failures: otherwise each of many short waits
// would connect, fail and log that.
func (l *listener) run() {
	l.needed = time.Now()
	for {
		began := time.Now()
		err := l.listen()
		l.queue.listens(0)
		if l.stopping.Err() != nil {
			return
		}
		if errors.Is(err, errIdle) || time.Since(began) > clock.MaxListenDelay {
			l.retry = firstListenRetry
		}
		if errors.Is(err, errIdle) {
			if l.ends() {
				return
			}
			continue
		}
		if errors.Is(err, lockerr.ErrPooler) || errors.Is(err, dbconn.ErrUnheard) {
			l.retry = clock.MaxListenDelay
		}
		l.failed(err)
		if !clock.Sleep(l.stopping, clock.Jitter(l.retry)) {
			return
		}
		l.retry = min(2*l.retry, clock.MaxListenDelay)
		if l.idle() && l.ends() {
			return
		}
	}
}

// failed logs the first of the failures in a row, and that they go on every reportEvery.
func (l *listener) failed(err error) {
	now := time.Now()
	switch l.failures++; {
	case l.failures == 1:
		l.since = now
		l.queue.config.Log.Warn("pgxlock: releases by other processes are noticed by polling until the listener is back", "error", err)
	case now.Sub(l.reported) >= reportEvery:
		l.queue.config.Log.Warn("pgxlock: the listener still fails; releases by other processes are noticed by polling", "failures", l.failures, "since", l.since, "error", err)
	default:
		return
	}
	l.reported = now
}

// listen listens until the connection ends.
func (l *listener) listen() error {
	client := dbconn.RandomID()
	ready := func(ctx context.Context, c *dbconn.Conn) error { return l.setUp(ctx, c, client) }
	made, err := l.Connect(l.stopping, dbconn.Dial{Place: l.queue.server.Place}, ready)
	if err != nil {
		return err
	}
	conn := made.Conn
	defer dbconn.CloseQuietly(conn)
	if err := l.hears(conn, client); err != nil {
		return err
	}
	l.queue.listens(client)
	if l.failures > 0 {
		l.queue.config.Log.Info("pgxlock: the listener is back")
		l.failures = 0
	}
	l.queue.server.Leaders.Look() // a leader may have been asked to step down while the listener was away
	var holder int32
	for {
		if err := l.queue.server.Place.CheckMoved(made); err != nil {
			return err
		}
		if now := l.holds(); now != holder {
			holder = now
			text := strings.NewReplacer("/* client */", strconv.FormatInt(client, 10), "/* pid */", strconv.Itoa(int(holder))).Replace(statements.QueueListenHolder.Text())
			if err := l.briefly(func(ctx context.Context) error {
				_, err := conn.PgConn().Exec(ctx, text).ReadAll()
				return err
			}); err != nil {
				return err
			}
		}
		if err := l.publishNames(conn); err != nil {
			return err
		}
		if err := l.receive(conn, holder); err != nil {
			return err
		}
		if l.idle() {
			return errIdle
		}
	}
}

// handle handles a notification, which any role may have sent.
func (l *listener) handle(n *pgconn.Notification) {
	text, ok := readPayload(n.Payload)
	switch holder := strings.HasPrefix(n.Channel, "pgxlock_holder_"); {
	case !ok:
	case n.Channel == "pgxlock_step_down":
		if text == "" {
			l.queue.server.Leaders.Look()
		}
	case holder && text == evictNotice:
		if l.queue.server.Session != nil {
			l.queue.server.Session.Evicted()
		}
	default:
		l.queue.heard(text, holder)
	}
}

// readPayload returns what follows the protocol in a payload: a digit from 1 on, and a colon.
// Later protocols are read as this one. They have one digit, because the server sends the equal
// payloads of a transaction once: with more room a role could have one lock looked at for each
// of many numbers.
func readPayload(payload string) (text string, ok bool) {
	if len(payload) < 2 || payload[0] < '1' || payload[0] > '9' || payload[1] != ':' {
		return "", false
	}
	return payload[2:], true
}

// listenFor makes it also receive the notifications for the holder with this backend.
func (l *listener) listenFor(holder int32) {
	l.mu.Lock()
	l.holder = holder
	if l.interrupt != nil {
		l.interrupt()
	}
	l.mu.Unlock()
	l.start()
}

func (l *listener) holds() int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder
}

// evictNotice is the text of the notification after which a Locker checks whether its
// advisory locks were evicted.
const evictNotice = "evict"

// briefly runs an exchange that the server answers at once.
func (l *listener) briefly(do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(l.stopping, listenPing)
	defer cancel()
	return do(ctx)
}

// setUp prepares the session, which listens under that random number.
func (l *listener) setUp(ctx context.Context, c *dbconn.Conn, client int64) error {
	if !c.Direct() {
		return fmt.Errorf("%w, and neither does LISTEN", lockerr.ErrPooler)
	}
	answers, err := c.Own(ctx, dbconn.Own{Place: l.queue.server.Place, Session: dbconn.OwnSession(), Then: func(schema string) []dbconn.Step {
		steps := []dbconn.Step{{SQL: statements.QueueAlive.In(schema), Args: []any{client}}}
		for listen := range strings.SplitSeq(strings.ReplaceAll(statements.QueueListen.Text(), "/* client */", strconv.FormatInt(client, 10)), ";") {
			steps = append(steps, dbconn.Step{SQL: listen})
		}
		return steps
	}})
	if err != nil {
		return err
	}
	var alone bool
	if err := dbconn.ScanRow(c.TypeMap(), answers[0], &alone); err != nil {
		return err
	}
	if !alone {
		return errors.New("another session listens under the same number")
	}
	return nil
}

// hears makes sure that notifications arrive. The one that it waits for comes from another
// session: some poolers deliver only those of the session itself.
func (l *listener) hears(conn *pgx.Conn, client int64) error {
	err := l.queue.send(statements.QueueNotify, client)
	for errors.Is(err, dbconn.ErrConnecting) && l.stopping.Err() == nil { // the other session is slower to connect
		err = l.queue.send(statements.QueueNotify, client)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(l.stopping, dbconn.Timeout)
	defer cancel()
	if _, err = conn.WaitForNotification(ctx); err != nil && ctx.Err() != nil {
		return dbconn.ErrUnheard
	}
	return err
}

// receive handles notifications for a while, or until the holder to listen for has changed. If
// there were none, a ping checks the session.
func (l *listener) receive(conn *pgx.Conn, holder int32) error {
	ctx, cancel := context.WithTimeout(l.stopping, min(listenPing, max(l.Config.MaxConnIdleTime, 100*time.Millisecond)))
	defer cancel()
	l.mu.Lock()
	if l.holder != holder { // it changed since listen read it
		l.mu.Unlock()
		return nil
	}
	l.interrupt = cancel
	l.mu.Unlock()
	quiet, err := true, error(nil)
	for err == nil {
		var n *pgconn.Notification
		if n, err = conn.WaitForNotification(ctx); n != nil {
			l.handle(n)
			quiet = false
		}
	}
	l.mu.Lock()
	l.interrupt = nil
	l.mu.Unlock()
	switch {
	case ctx.Err() == nil || l.stopping.Err() != nil || conn.IsClosed():
		return err
	case quiet: // else the answer would come after all the notifications that there are
		return l.briefly(conn.Ping)
	}
	return nil
}

// publishEvery is how often the names of advisory locks are published that nobody could see yet.
const publishEvery = 2 * time.Second

// publishNames publishes the names on the connection that listens. An error of the server,
// for example a missing right, is logged and costs nobody a lock.
func (l *listener) publishNames(conn *pgx.Conn) error {
	if l.queue.server.Session == nil || time.Since(l.named) < publishEvery {
		return nil
	}
	l.named = time.Now()
	keys := l.queue.server.Session.Unpublished()
	if len(keys) == 0 {
		return nil
	}
	names, namespaces := make([]string, len(keys)), make([]*string, len(keys))
	for i, key := range keys {
		namespaces[i], names[i] = lockkey.Within(key)
	}
	err := l.briefly(func(ctx context.Context) error {
		return dbconn.Querier{Conn: conn, Direct: true}.Exec(ctx, l.queue.server.Place.Statement(statements.AdvisoryPublishNames), names, namespaces)
	})
	if lockerr.SQLState(err) != "" && !conn.IsClosed() {
		l.queue.config.Log.Debug("pgxlock: the names of locks are not published", "locks", len(keys), "error", err)
		return nil
	}
	return err
}
