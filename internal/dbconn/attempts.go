package dbconn

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Attempts connect for one user of a connection, one attempt at a time. An attempt pauses after
// failures, also of other users, and its error says for how long and how often it was tried.
type Attempts struct {
	Dialer

	mu    sync.Mutex
	tried int       // how often since the last connection, with the attempt in flight
	began time.Time // when the first of them began
	last  error     // why the server could not be reached by the last of them that has ended; nil: none has
}

// Connect makes one attempt. finish makes the new connection ready, and the attempt fails with
// it. From then on the connection is quiet. If ctx is cancelled, the error is [lockerr.ErrClosed].
func (a *Attempts) Connect(ctx context.Context, dial Dial, finish func(context.Context, *Conn) error) (*Conn, error) {
	now := time.Now()
	a.mu.Lock()
	if a.tried++; a.tried == 1 {
		a.began = now
	}
	a.mu.Unlock()
	within := ctx
	if dial.Most > 0 {
		var cancel context.CancelFunc
		within, cancel = context.WithTimeout(ctx, dial.Most)
		defer cancel()
	}
	server := a.server()
	pause := outages.pause(server, now)
	if dial.Most > 0 {
		pause = min(pause, dial.Most/10)
		dial.Most -= pause
	}
	c, err := (*Conn)(nil), error(nil)
	if pause <= 0 || clock.Sleep(ctx, pause) {
		c, err = a.Dial(within, dial)
	}
	if err == nil && c != nil {
		ready, cancel := context.WithTimeout(within, c.limit)
		err = finish(ready, c)
		cancel()
		if err != nil {
			CloseQuietly(c.Conn)
		}
	}
	switch err = NoAnswer(err); {
	case ctx.Err() != nil && (c == nil || err != nil):
		return nil, lockerr.ErrClosed
	case err == nil:
		a.mu.Lock()
		a.tried, a.last = 0, nil
		a.mu.Unlock()
		outages.over(server)
		hush(c.PgConn().Conn())
		return c, nil
	case lockerr.Unreachable(err):
		outages.failed(server)
		a.mu.Lock()
		a.last = err
		a.mu.Unlock()
		if a.lasts() {
			err = fmt.Errorf("%w (%s)", err, a.Tried())
		}
		return nil, err
	default:
		return nil, err
	}
}

// ErrConnecting means that a call did not wait any longer for an attempt to connect.
var ErrConnecting = errors.New("still connecting")

// Now is the wait of a call that does not wait for a connection.
var Now = func() context.Context {
	ctx, end := context.WithCancelCause(context.Background())
	end(lockerr.ErrNoAnswer)
	return ctx
}()

// left returns the error of a call that waited until wait ended.
func (a *Attempts) left(wait context.Context) error {
	cause := context.Cause(wait)
	if !errors.Is(cause, lockerr.ErrNoAnswer) && !errors.Is(cause, lockerr.ErrClosed) { // it is a caller's
		cause = lockerr.ContextError(wait)
	}
	return a.connecting(cause)
}

// connecting adds to why a wait has ended that there is no connection, and since when, and if the
// wait was not ended by its caller, why the last attempt failed.
func (a *Attempts) connecting(why error) error {
	a.mu.Lock()
	last := a.last
	a.mu.Unlock()
	if last != nil && errors.Is(why, lockerr.ErrNoAnswer) {
		return fmt.Errorf("%w: %w: %w (%s)", why, ErrConnecting, last, a.Tried())
	}
	return fmt.Errorf("%w: %w (%s)", why, ErrConnecting, a.Tried())
}

// Explain adds to err, with which a wait has ended, that there is no connection, if that is why.
func (a *Attempts) Explain(err error) error {
	if _, failed := errors.AsType[*pgconn.ConnectError](err); failed || !errors.Is(err, lockerr.ErrNoAnswer) || errors.Is(err, ErrConnecting) {
		return err // an attempt that failed says so itself
	}
	if a.Tried() == "" {
		return err
	}
	return a.connecting(err)
}

// Tried says how often it was tried to connect, and for how long; "" if there was no attempt
// since the last connection.
func (a *Attempts) Tried() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	times := fmt.Sprintf("tried %d times", a.tried)
	switch a.tried {
	case 0:
		return ""
	case 1:
		times = "tried once"
	}
	took := time.Since(a.began)
	unit := time.Millisecond
	if took > time.Second {
		unit = 100 * time.Millisecond
	}
	return fmt.Sprintf("%s in %s", times, took.Round(unit))
}

// lasts reports whether it is worth saying how often and for how long it was tried: not that a
// server that is down refused once and at once.
func (a *Attempts) lasts() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.tried > 1 || time.Since(a.began) > time.Second
}

// server names the servers that the Dialer may lead to.
func (d *Dialer) server() string {
	first := d.Config.ConnConfig
	var name strings.Builder
	fmt.Fprint(&name, first.Host, " ", first.Port)
	for _, other := range first.Fallbacks {
		fmt.Fprint(&name, " ", other.Host, " ", other.Port)
	}
	return name.String()
}

// outages are the servers that could not be used lately. All connections of a program learn it
// from one failure: a server that is busy or starting gets well only if it is left alone.
var outages = outageLog{servers: make(map[string]outage)}

type outageLog struct {
	mu      sync.Mutex
	servers map[string]outage
}

// An outage is the failures of a server since it was last connected to.
type outage struct {
	failures int
	last     time.Time
}

var outageBackoff = clock.Backoff(10*time.Millisecond, clock.MaxReconnectDelay)

// pause returns how long the next attempt must wait.
func (l *outageLog) pause(server string, now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	o, out := l.servers[server]
	if !out {
		return 0
	}
	return o.last.Add(outageBackoff(o.failures - 1)).Sub(now)
}

func (l *outageLog) failed(server string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.servers[server] = outage{l.servers[server].failures + 1, time.Now()}
}

func (l *outageLog) over(server string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.servers, server)
}
