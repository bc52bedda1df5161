package dbconn

import (
	"encoding/binary"
	"errors"

	"github.com/jackc/pgx/v5/pgtype"
)

// Arguments are the arguments of a statement for many entries: arrays, in the binary format; or
// of one for a single entry, which has the elements in place of arrays. Writing them by hand costs
// no object for each element. The zero value has none, and is for many.
type Arguments struct {
	single bool
	buffer []byte
	ends   []int // of each argument, in the buffer; noEnd: it is NULL
}

// Reset removes all arguments, and keeps their memory for others. single: they are for one entry.
func (a *Arguments) Reset(single bool) { a.single, a.buffer, a.ends = single, a.buffer[:0], a.ends[:0] }

// values returns the arguments as the protocol wants them.
func (a *Arguments) values() [][]byte {
	values, start := make([][]byte, len(a.ends)), 0
	for i, end := range a.ends {
		if end == noEnd {
			continue
		}
		values[i] = a.buffer[start:end:end]
		start = end
	}
	return values
}

// traced returns the arguments for a tracer.
func (a *Arguments) traced() []any {
	values := a.values()
	args := make([]any, len(values))
	for i, value := range values {
		args[i] = value
	}
	return args
}

// AddTexts adds a text[] of n elements. An element that is nil is NULL.
func AddTexts[E any](to *Arguments, entries []E, element func(E) *string) {
	addArray(to, pgtype.TextOID, entries, func(b []byte, e E) ([]byte, bool) {
		text := element(e)
		if text == nil {
			return b, false
		}
		return append(b, *text...), true
	})
}

// AddBigints adds a bigint[]. An element with false is NULL.
func AddBigints[E any](to *Arguments, entries []E, element func(E) (int64, bool)) {
	addArray(to, pgtype.Int8OID, entries, func(b []byte, e E) ([]byte, bool) {
		number, ok := element(e)
		if !ok {
			return b, false
		}
		return binary.BigEndian.AppendUint64(b, uint64(number)), true
	})
}

// OrNull returns what a pointer points to, and false if it is nil.
func OrNull(number *int64) (int64, bool) {
	if number == nil {
		return 0, false
	}
	return *number, true
}

// AddIntegers adds an integer[].
func AddIntegers[E any](to *Arguments, entries []E, element func(E) int32) {
	addArray(to, pgtype.Int4OID, entries, func(b []byte, e E) ([]byte, bool) {
		return binary.BigEndian.AppendUint32(b, uint32(element(e))), true
	})
}

// addArray adds an array of one dimension.
// https://github.com/postgres/postgres/blob/master/src/backend/utils/adt/arrayfuncs.c (array_recv)
func addArray[E any](to *Arguments, oid uint32, entries []E, appendOne func([]byte, E) ([]byte, bool)) {
	if to.single {
		end := noEnd
		if b, ok := appendOne(to.buffer, entries[0]); ok {
			to.buffer, end = b, len(b)
		}
		to.ends = append(to.ends, end)
		return
	}
	b := to.buffer
	if len(entries) == 0 {
		b = appendIntegers(b, 0, 0, oid)
	} else {
		const mayHaveNulls, lowerBound = 1, 1
		b = appendIntegers(b, 1, mayHaveNulls, oid, uint32(len(entries)), lowerBound)
	}
	for _, e := range entries {
		start := len(b)
		b = appendIntegers(b, null)
		var ok bool
		if b, ok = appendOne(b, e); ok {
			binary.BigEndian.PutUint32(b[start:], uint32(len(b)-start-4))
		}
	}
	to.buffer, to.ends = b, append(to.ends, len(b))
}

const (
	null  = 0xffffffff // the length of an element that is NULL
	noEnd = -1         // of an argument that is NULL
)

func appendIntegers(to []byte, numbers ...uint32) []byte {
	for _, n := range numbers {
		to = binary.BigEndian.AppendUint32(to, n)
	}
	return to
}

// ErrForeign means that an answer is none that our statements have.
var ErrForeign = errors.New("the server does not answer as PostgreSQL does")

// An Array reads an array of one dimension in the binary format. A NULL has no elements.
type Array struct {
	rest   []byte
	single bool // rest is the only element
}

// SingleElement returns an array of one element.
func SingleElement(value []byte) Array { return Array{rest: value, single: true} }

// ReadArray returns the elements of an array, and how many it has.
func ReadArray(value []byte) (a Array, n int, err error) {
	const header, whole = 12, 20
	if value == nil {
		return Array{}, 0, nil
	}
	if len(value) < header {
		return Array{}, 0, ErrForeign
	}
	switch dimensions := binary.BigEndian.Uint32(value); {
	case dimensions == 0:
		return Array{}, 0, nil
	case dimensions != 1 || len(value) < whole:
		return Array{}, 0, ErrForeign
	}
	return Array{rest: value[whole:]}, int(binary.BigEndian.Uint32(value[header:])), nil
}

// Next returns the next element; nil for NULL, and after the last one.
func (a *Array) Next() []byte {
	if a.single {
		return a.rest
	}
	if len(a.rest) < 4 {
		return nil
	}
	length := binary.BigEndian.Uint32(a.rest)
	a.rest = a.rest[4:]
	if length == null || int(length) > len(a.rest) {
		return nil
	}
	element := a.rest[:length:length]
	a.rest = a.rest[length:]
	return element
}

// Integer returns a bigint, an integer or a boolean in the binary format, and false for NULL.
func Integer(value []byte) (n int64, ok bool) {
	switch len(value) {
	case 8:
		return int64(binary.BigEndian.Uint64(value)), true
	case 4:
		return int64(int32(binary.BigEndian.Uint32(value))), true
	case 1:
		return int64(value[0]), true
	}
	return 0, false
}
