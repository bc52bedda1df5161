package pgxlock

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

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/sql"
)

// A listener hears when a lock was given back that somebody here waits for: on a
// connection of its own, which it makes when somebody first does. Its session has an
// advisory lock for as long as it lives, by which others know that its tickets count.
//
// Where notifications do not arrive, as behind most poolers, it says so and tries again
// later; then those who wait ask now and then.
type listener struct {
	dbconn.Dialer
	queue *queue

	once    sync.Once
	running context.Context // ends with stop
	cancel  context.CancelFunc
	ended   chan struct{}
	named   time.Time // when names were published last

	mu        sync.Mutex
	holder    int32              // the backend whose locks may be asked for; 0: none
	interrupt context.CancelFunc // ends the wait for a notification; nil: there is none
}

const (
	// listenPing is how long it may be silent before we look whether it lives.
	listenPing = 5 * time.Second

	// listenRetry is how long to wait after a failure, at most. Meanwhile those
	// who wait ask by themselves.
	listenRetry = 30 * time.Second
)

func newListener(d dbconn.Dialer, q *queue) *listener {
	l := &listener{Dialer: d, queue: q, ended: make(chan struct{})}
	l.running, l.cancel = context.WithCancel(context.Background())
	return l
}

// start begins to listen, unless that has begun.
func (l *listener) start() {
	l.once.Do(func() { go l.run() })
}

// stop returns when it does not listen any more.
func (l *listener) stop() {
	l.cancel()
	l.once.Do(func() { close(l.ended) })
	<-l.ended
}

func (l *listener) run() {
	defer close(l.ended)
	retry, said := 100*time.Millisecond, false
	for {
		began := time.Now()
		err := l.listen()
		l.queue.listens(0)
		if l.running.Err() != nil {
			return
		}
		if time.Since(began) > listenRetry {
			retry, said = 100*time.Millisecond, false
		}
		if errors.Is(err, ErrPooler) || errors.Is(err, dbconn.ErrUnheard) {
			retry = listenRetry
		}
		if !said { // and not each time that it fails again
			l.queue.log.Warn("pgxlock: releases by other processes are noticed by polling until the listener is back", "error", err)
			said = true
		}
		if !clock.Sleep(l.running, clock.Jitter(retry)) {
			return
		}
		retry = min(2*retry, listenRetry)
	}
}

// listen listens until the connection ends.
func (l *listener) listen() error {
	ctx, cancel := context.WithTimeout(l.running, dbconn.Timeout)
	defer cancel()
	conn, err := l.Dial(ctx, dbconn.Timeout, func(*pgconn.Notice) {})
	if err != nil {
		return err
	}
	defer dbconn.CloseQuietly(conn)
	client, err := l.setUp(ctx, conn)
	if err != nil {
		return err
	}
	l.queue.listens(client)
	var holder int32
	for {
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
		n, err := l.next(conn, holder)
		if err != nil {
			return err
		}
		switch {
		case n == nil:
		case n.Payload == evictNotice:
			l.queue.evicted()
		case n.Channel == "pgxlock_step_down":
			l.queue.stepDown()
		default:
			l.queue.heard(n.Payload, strings.HasPrefix(n.Channel, "pgxlock_holder_"))
		}
	}
}

// listenFor makes it hear of those as well who want the locks of a backend.
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

// briefly runs what the server answers at once.
func (l *listener) briefly(do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(l.running, listenPing)
	defer cancel()
	return do(ctx)
}

// setUp returns as whom the session listens: a number that it draws for itself.
func (l *listener) setUp(ctx context.Context, conn *pgx.Conn) (client int64, err error) {
	q := dbconn.Querier{Conn: conn}
	backend, _, err := dbconn.WhoServes(ctx, q) // before anything is set, which a pooler would give to others
	if err != nil {
		return 0, err
	}
	if !backend.Serves(conn) {
		return 0, fmt.Errorf("%w, and neither does LISTEN", ErrPooler)
	}
	const local = false
	if err := q.Exec(ctx, statements.ConnSession.Text(), local); err != nil {
		return 0, err
	}
	if err := l.queue.place.Find(ctx, q); err != nil { // as long as search_path is the role's
		return 0, err
	}
	if err := q.Exec(ctx, statements.ConnSearchPath.Text(), local); err != nil {
		return 0, err
	}

	client = dbconn.RandomID()
	var alone bool
	if err := q.Row(ctx, l.queue.place.Statement(statements.QueueAlive), client).Scan(&alone); err != nil {
		return 0, err
	}
	if !alone {
		return 0, errors.New("another session listens under the same number")
	}
	listen := strings.ReplaceAll(statements.QueueListen.Text(), "/* client */", strconv.FormatInt(client, 10))
	if err := q.Exec(ctx, listen); err != nil {
		return 0, err
	}

	// Sent from here it would arrive through a pooler that lets nothing else through.
	if err := l.queue.send(statements.QueueNotify, client); err != nil {
		return 0, err
	}
	switch _, err := conn.WaitForNotification(ctx); {
	case err == nil:
		return client, nil
	case ctx.Err() != nil:
		return 0, dbconn.ErrUnheard
	default:
		return 0, err
	}
}

// next returns the next notification, or none after a while in which the session was
// found to live, or when it shall listen to something else.
func (l *listener) next(conn *pgx.Conn, holder int32) (*pgconn.Notification, error) {
	quiet, cancel := context.WithTimeout(l.running, listenPing)
	defer cancel()
	l.mu.Lock()
	if l.holder != holder { // since it was looked at
		l.mu.Unlock()
		return nil, nil
	}
	l.interrupt = cancel
	l.mu.Unlock()
	n, err := conn.WaitForNotification(quiet)
	l.mu.Lock()
	l.interrupt = nil
	l.mu.Unlock()
	switch {
	case err == nil:
		return n, nil
	case quiet.Err() == nil || l.running.Err() != nil || conn.IsClosed():
		return nil, err
	}
	return nil, l.briefly(conn.Ping)
}
