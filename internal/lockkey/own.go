package lockkey

import (
	"crypto/sha256"
	"encoding/binary"
)

// ownMark is the highest 24 bits of pgxlock's own advisory keys, which the SQL function
// pgxlock_own_key makes. Its last bit is set in the keys that a session holds for as long as
// it lives.
const ownMark = 0x706c6a

// IsOwn reports whether the key carries the mark of pgxlock's own. One key of a user in 8
// million does by chance.
func (id ID) IsOwn() bool { return !id.Pair && id.Number>>41 == ownMark>>1 }

// OwnLabel says what a key with the mark is, by the mode in which it is held.
func (id ID) OwnLabel(shared bool) string {
	switch lasting := id.Number>>40&1 == 1; {
	case lasting && shared:
		return "pgxlock: check whether a session lives"
	case lasting:
		return "pgxlock: liveness of a session"
	case shared:
		return "pgxlock: pin of a fenced transaction"
	}
	return "pgxlock: guard or pin of a transaction"
}

// SessionKey is what the SQL function pgxlock_session_key returns.
func SessionKey(session int64) int64 { return lastingKey("session", session) }

// WaiterKey is what the SQL function pgxlock_waiter_key returns.
func WaiterKey(client int64) int64 { return lastingKey("waiter", client) }

// lastingKey is the key that a session holds for as long as it lives.
func lastingKey(space string, number int64) int64 {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte("\x00"+space+"\x00"), uint64(number)))
	return (ownMark|1)<<40 | int64(binary.BigEndian.Uint64(sum[:8])>>24)
}
