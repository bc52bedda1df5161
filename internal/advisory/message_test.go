package advisory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// callers tries for so many keys beside the test: the second of them is held by another process.
func callers(t *testing.T, p, other *process, n int) (keys []string, outcomes []<-chan tried) {
	t.Helper()
	for i := range n {
		key := fmt.Sprintf("%d of %d", i, n)
		if i == 1 {
			mustAcquire(t, other, key, hold.Exclusive)
		}
		keys, outcomes = append(keys, key), append(outcomes, trying(t.Context(), p, key, hold.Exclusive))
		queued(t, p.mux, i+2)
	}
	return keys, outcomes
}

func TestEachRequestOfAMessageGetsItsOwnAnswer(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, other := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{})
	for _, n := range []int{1, 2, mostCalls, mostCalls + 1, 20} { // function calls, and one statement
		resume := stall(p.mux)
		keys, outcomes := callers(t, p, other, n)
		send(t, p.mux)
		if calls := p.mux.message.bytes[0] == 'F'; calls != (n <= mostCalls) && p.mux.conn.functions != nil {
			t.Errorf("%d requests are function calls: %t", n, calls)
		}
		resume()
		for i, outcome := range outcomes {
			switch got := <-outcome; {
			case i == 1 && !errors.Is(got.err, lockerr.ErrNotAcquired):
				t.Errorf("%d requests: %s: %v, want ErrNotAcquired", n, keys[i], got.err)
			case i != 1 && got.err != nil:
				t.Errorf("%d requests: %s: %v", n, keys[i], got.err)
			case i != 1:
				if err := got.lock.release(); err != nil {
					t.Error(err)
				}
				wantFree(t, p, keys[i])
			}
		}
	}
}

// The other calls of the message have been answered, and may have been granted.
func TestFunctionCallThatFailsIsUndoneWithTheOthersOfItsMessage(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `create function fails(bigint) returns boolean language plpgsql as $$ begin raise exception 'no' using errcode = 'LK999'; end $$`)
	p, other := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{})
	if p.mux.conn.functions == nil {
		t.Skip("the connection does not end in its backend")
	}
	for at := range mostCalls {
		busy := (at + 1) % mostCalls
		key := func(i int) string { return fmt.Sprintf("%d of %d", i, at) }
		mustAcquire(t, other, key(busy), hold.Exclusive)
		resume := stall(p.mux)
		if err := db.Pool.QueryRow(t.Context(), "select 'fails(bigint)'::regprocedure::oid").Scan(&p.mux.conn.functions[lockkey.AskTryShared]); err != nil {
			t.Fatal(err)
		}
		outcomes := make([]<-chan tried, mostCalls)
		for i := range outcomes {
			mode := hold.Exclusive
			if i == at {
				mode = hold.Shared
			}
			outcomes[i] = trying(t.Context(), p, key(i), mode)
			queued(t, p.mux, i+2)
		}
		resume()
		for i, outcome := range outcomes {
			got := <-outcome
			switch {
			case i == at && lockerr.SQLState(got.err) != "LK999":
				t.Errorf("the call that fails, %d: %v", at, got.err)
			case i == busy && !errors.Is(got.err, lockerr.ErrNotAcquired), i != at && i != busy && got.err != nil:
				t.Errorf("call %d beside %d: %v", i, at, got.err)
			case got.err == nil:
				if err := got.lock.release(); err != nil {
					t.Error(err)
				}
				wantFree(t, p, key(i)) // one release is enough: what was granted at first is undone
			}
		}
	}
}

// A cutConn lets so many bytes through in a direction, and then breaks.
type cutConn struct {
	io.ReadWriter
	sends, receives int // how many bytes pass; negative: all
}

var errCut = errors.New("the connection was cut")

func (c *cutConn) Write(b []byte) (int, error) {
	if c.sends < 0 {
		return c.ReadWriter.Write(b)
	}
	n, _ := c.ReadWriter.Write(b[:min(c.sends, len(b))])
	return n, errCut
}

func (c *cutConn) Read(b []byte) (int, error) {
	if c.receives == 0 {
		return 0, errCut
	}
	n, err := c.ReadWriter.Read(b[:min(max(c.receives, 1), len(b))])
	if c.receives > 0 {
		c.receives -= n
	}
	return n, err
}

// The server may have executed some of the calls of a message, and all of them in the backend
// of a session that is gone.
func TestCallsOfAMessageThatIsCutAreMadeInTheNextSession(t *testing.T) {
	t.Parallel()
	const request, response = 29, 16 // of a call for one number
	for name, cut := range rows(map[string]func(*cutConn, int){
		"requests": func(c *cutConn, n int) { c.sends, c.receives = n, 0 },
		"answers":  func(c *cutConn, n int) { c.sends, c.receives = -1, n },
	}, "answers") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			p, other := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{})
			mustAcquire(t, other, "busy", hold.Exclusive)
			size := map[string]int{"requests": request, "answers": response}[name] * mostCalls
			step := 7
			if testing.Short() {
				step = size / 2
			}
			for n := 0; n < size; n += step {
				held := mustAcquire(t, p, "held", hold.Exclusive)
				_ = stall(p.mux)
				conn := &cutConn{ReadWriter: p.mux.conn.net}
				cut(conn, n)
				p.mux.conn.frontend, p.mux.conn.writer = pgproto3.NewFrontend(conn, conn), conn
				var outcomes []<-chan tried
				for i, key := range []string{"a", "busy", "c"} {
					outcomes = append(outcomes, trying(t.Context(), p, key, hold.Exclusive))
					queued(t, p.mux, i+2)
				}
				released := make(chan error, 1)
				go func() { released <- held.release() }()
				queued(t, p.mux, mostCalls+1)
				p.mux.lead(nil)
				for i, outcome := range outcomes {
					got := <-outcome
					if i == 1 {
						if !errors.Is(got.err, lockerr.ErrNotAcquired) {
							t.Errorf("cut after %d bytes: of a lock that is held: %v", n, got.err)
						}
						continue
					}
					if got.err != nil {
						t.Fatalf("cut after %d bytes: %v", n, got.err)
					}
					if err := got.lock.release(); err != nil {
						t.Errorf("cut after %d bytes: %v", n, err)
					}
				}
				if err := <-released; err != nil && !errors.Is(err, lockerr.ErrLost) {
					t.Errorf("cut after %d bytes: Release: %v", n, err)
				}
				for _, key := range []string{"a", "c", "held"} {
					wantFree(t, p, key)
				}
			}
		})
	}
}

// The client sends some of the calls of a message, and then stands still.
func TestServerFreesWhatTheFirstCallsOfAMessageAcquiredIfTheRestNeverComes(t *testing.T) {
	t.Parallel()
	const request = 29
	const boolTrue = 1
	for name, n := range rows(map[string]int{
		"after a call": request, "after a byte of the next one": request + 1, "in its head": request + 5, "before its last byte": 2*request - 1,
	}, "in its head") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			p, other := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{})
			if p.mux.conn.functions == nil {
				t.Skip("the connection does not end in its backend")
			}
			_ = stall(p.mux)
			var sent bytes.Buffer
			conn := p.mux.conn.net
			p.mux.conn.writer = &sent
			ctx, cancel := context.WithCancel(t.Context())
			_ = trying(ctx, p, "first", hold.Exclusive)
			queued(t, p.mux, 2)
			_ = trying(ctx, p, "second", hold.Exclusive)
			queued(t, p.mux, 3)
			send(t, p.mux)
			if sent.Len() != 2*request {
				t.Errorf("%d bytes, want %d", sent.Len(), 2*request)
			}
			// The session is silent from its first message on, as if for its TTL.
			shortens, err := (&pgproto3.Query{String: "set idle_session_timeout = '200ms'"}).Encode(nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(append(shortens, sent.Bytes()[:n]...)); err != nil {
				t.Fatal(err)
			}
			for granted := false; !granted; {
				received, err := p.mux.conn.frontend.Receive()
				if err != nil {
					t.Fatal(err)
				}
				if answer, ok := received.(*pgproto3.FunctionCallResponse); ok {
					if granted = slices.Equal(answer.Result, []byte{boolTrue}); !granted {
						t.Fatalf("the first call was refused: %v", answer.Result)
					}
				}
			}
			for _, key := range []string{"first", "second"} {
				if err := mustAcquire(t, other, key, hold.Exclusive).release(); err != nil {
					t.Error(err)
				}
			}
			if err := p.mux.conn.listen(); lockerr.SQLState(err) != "57P05" {
				t.Errorf("the session ended otherwise than by its silence: %v", err)
			}
			cancel()
			p.mux.lead(nil)
		})
	}
}
