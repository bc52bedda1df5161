package advisory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// An ask is one request for one lock: to try it or to release it.
type ask struct {
	what lockkey.Ask
	lock lockkey.ID
}

// undone returns the request that undoes an ask, whether or not it was granted.
func (a ask) undone() ask {
	switch a.what {
	case lockkey.AskTry:
		a.what = lockkey.AskUnlock
	case lockkey.AskTryShared:
		a.what = lockkey.AskUnlockShared
	}
	return a
}

// A message is what is sent at once, and the server's answer.
type message struct {
	bytes []byte
	batch bool // it carries the requests of a batch of calls, otherwise another statement
	asked int  // the number of those requests
	parts int  // how many statements or function calls it still waits for

	// The answer.
	err     *pgconn.PgError // the first error
	lazy    bool            // the server did not wait for the replication of a commit
	answers []answer        // to the requests of a batch
	ended   error           // why the session cannot be used any more; nil: it can
	rows    [][]string      // of another statement
}

// An answer is the server's answer to one ask.
type answer struct {
	granted bool
	token   int64 // 0: none
}

// readAnswer reads true or false, or with tokens a token or NULL.
func readAnswer(value []byte) answer {
	switch string(value) {
	case "t":
		return answer{granted: true}
	case "f", "NULL", "":
		return answer{}
	}
	token, err := strconv.ParseInt(string(value), 10, 64)
	return answer{granted: err == nil, token: token}
}

var comma = []byte{','}

// write builds the message for a batch of calls.
func (s *session) write(m *message, batch []*call) {
	*m = message{bytes: m.bytes[:0], answers: m.answers[:0], parts: 1}
	if len(batch) > 0 && batch[0].query != nil {
		m.begin()
		m.bytes = append(m.bytes, ofSession(batch[0].query.text, s.session)...)
		m.end()
		return
	}
	m.batch = true
	for _, c := range batch {
		m.asked += len(c.asks)
	}
	if m.asked > 0 && m.asked <= mostCalls && s.functions != nil {
		for _, c := range batch {
			for _, a := range c.asks {
				m.bytes = s.functions.appendOne(m.bytes, a)
			}
		}
		m.parts = m.asked
		return
	}
	m.begin()
	m.bytes = append(m.bytes, s.many[0]...)
	for _, c := range batch {
		for _, a := range c.asks {
			m.bytes = append(strconv.AppendInt(m.bytes, int64(a.what.Of(a.lock)), 10), ',')
		}
	}
	m.bytes = append(bytes.TrimSuffix(m.bytes, comma), s.many[1]...)
	for _, c := range batch {
		for _, a := range c.asks {
			m.bytes = append(strconv.AppendInt(m.bytes, a.lock.Number, 10), ',')
		}
	}
	m.bytes = append(bytes.TrimSuffix(m.bytes, comma), s.many[2]...)
	m.end()
}

// begin and end make a Query message of the text appended between them.
func (m *message) begin() { m.bytes = append(m.bytes, 'Q', 0, 0, 0, 0) }

func (m *message) end() {
	m.bytes = append(m.bytes, 0)
	binary.BigEndian.PutUint32(m.bytes[1:], uint32(len(m.bytes)-1))
}

// answer reads the row with the answers to a batch.
func (m *message) answer(row [][]byte, backend int32) {
	switch {
	case len(row) != 3:
		m.ended = errForeign
	case string(row[0]) != strconv.Itoa(int(backend)):
		m.ended = dbconn.SwitchedBackend(backend, string(row[0]))
	case string(row[1]) != "f":
		m.ended = errInRecovery
	default:
		for value := range bytes.SplitSeq(bytes.Trim(row[2], "{}"), comma) {
			m.answers = append(m.answers, readAnswer(value))
		}
	}
}

var (
	errForeign    = errors.New("the server does not answer as PostgreSQL does")
	errInRecovery = fmt.Errorf("%w: the server is in recovery", lockerr.ErrReadOnly)
)

// keep keeps a row of any other statement.
func (m *message) keep(values [][]byte) {
	row := make([]string, len(values))
	for i, value := range values {
		row[i] = string(value)
	}
	m.rows = append(m.rows, row)
}

// verdict returns why none of the requests counts as granted, and why the session cannot go
// on.
func (m *message) verdict() (failed, ended error) {
	switch {
	case m.err != nil && m.err.Code == lockerr.StateNoStatement:
		return nil, fmt.Errorf("%w: %w", lockerr.ErrPooler, m.err) // the statement was prepared on another connection
	case m.err != nil:
		return m.err, nil
	case m.ended != nil:
		return nil, m.ended
	case m.lazy:
		return dbconn.ErrNotReplicated, nil
	case m.batch && len(m.answers) < m.asked:
		return nil, errForeign
	}
	return nil, nil
}

// mostCalls is how many requests are function calls. The server needs as long for five of
// them as for the statement that carries many.
const mostCalls = 4

// functions are the numbers of the functions that a session calls, for each lockkey.Ask. A
// message with few requests, as most are, calls the function for each without a statement,
// which costs the server less than SELECT 1. The answer says neither which backend sent it
// nor whether that is in recovery: only a connection that is known to end in its backend
// calls functions. A primary does not become a standby while a session lasts.
// https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-FUNCTION-CALL
type functions []uint32

// readFunctions reads the numbers from the answer of the server.
func readFunctions(types *pgtype.Map, answer *pgconn.Result) (functions, error) {
	f := make(functions, len(answer.Rows))
	for i, row := range answer.Rows {
		if err := types.Scan(pgtype.OIDOID, answer.FieldDescriptions[0].Format, row[0], &f[i]); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// appendOne appends the call for one request, which has an answer of its own.
func (f functions) appendOne(to []byte, a ask) []byte {
	what := f[a.what.Of(a.lock)]
	if a.lock.Pair {
		return appendCall(to, what, uint64(uint32(a.lock.Number>>32)), uint64(uint32(a.lock.Number)))
	}
	return appendCall(to, what, uint64(a.lock.Number))
}

// appendCall appends a FunctionCall message, whose arguments are one bigint or two ints, and
// whose arguments and result are binary.
func appendCall(to []byte, function uint32, args ...uint64) []byte {
	const binaryFormat = 1
	size := 8
	if len(args) == 2 {
		size = 4
	}
	start := len(to)
	to = append(to, 'F', 0, 0, 0, 0)
	to = binary.BigEndian.AppendUint32(to, function)
	to = binary.BigEndian.AppendUint16(to, 1)
	to = binary.BigEndian.AppendUint16(to, binaryFormat)
	to = binary.BigEndian.AppendUint16(to, uint16(len(args)))
	for _, arg := range args {
		to = binary.BigEndian.AppendUint32(to, uint32(size))
		if size == 4 {
			to = binary.BigEndian.AppendUint32(to, uint32(arg))
		} else {
			to = binary.BigEndian.AppendUint64(to, arg)
		}
	}
	to = binary.BigEndian.AppendUint16(to, binaryFormat)
	binary.BigEndian.PutUint32(to[start+1:], uint32(len(to)-start-1))
	return to
}

// returned records the result of a call.
func (m *message) returned(result []byte) {
	if len(result) != 1 {
		m.ended = errForeign
		return
	}
	m.answers = append(m.answers, answer{granted: result[0] == 1})
}
