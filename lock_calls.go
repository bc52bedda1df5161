package pgxlock

import (
	"context"
	"encoding/binary"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/sql"
)

// This file asks for one thing alone, which is what most messages are, by a call of
// a function, without a statement. That costs the server less than SELECT 1. A call
// is one message that the server gets whole or not at all. It does not tell which
// backend answers, nor whether that is in recovery: so it is only for a connection that
// is known to end in its backend. A primary does not become a standby while a session
// lasts.
// https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-FUNCTION-CALL

// lockCalls are the numbers of the functions, for each lockkey.Ask.
type lockCalls []uint32

func findLockCalls(ctx context.Context, q dbconn.Querier) (lockCalls, error) {
	rows, err := q.Conn.Query(ctx, statements.AdvisoryFunctions.Text(), q.Args(nil)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[uint32])
}

// appendOne appends the call that asks one thing.
func (f lockCalls) appendOne(to []byte, a ask) []byte {
	what := f[a.what.Of(a.lock)]
	if a.lock.Pair {
		return appendCall(to, what, uint64(uint32(a.lock.Number>>32)), uint64(uint32(a.lock.Number)))
	}
	return appendCall(to, what, uint64(a.lock.Number))
}

// appendCall appends a FunctionCall: one bigint, or two ints, as its arguments and
// its result in binary.
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

// returned takes the result of a call.
func (m *message) returned(result []byte) {
	if len(result) != 1 {
		m.ended = errForeign
		return
	}
	m.answers = append(m.answers, lockAnswer{granted: result[0] == 1})
}
