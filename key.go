package pgxlock

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// AdvisoryID returns the number under which PostgreSQL's advisory lock functions
// know a key: the first 8 bytes, big endian, of the SHA-256 of its UTF-8 form.
// It is what the SQL function advisory_lock_key returns in every database
// encoding, so that a program in any language and psql lock the same thing:
//
//	SELECT pg_advisory_xact_lock(advisory_lock_key('invoice:42'))
//
// See https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
//
// Of a [RawKey] it is the number itself, of a [RawKey2] its two numbers one behind
// the other.
func AdvisoryID(key string) int64 { return identify(key).number }

// RawKey names the advisory lock with this number, for programs that have numbers
// for their locks already. It is taken by the kinds of lock that are advisory
// locks: a Locker of [NewAdvisory], and [LockTx]. Messages show it as #42. It
// begins with a zero byte, so that no name equals it.
func RawKey(id int64) string { return rawPrefix + strconv.FormatInt(id, 10) }

// RawKey2 is [RawKey] for the locks that have two numbers, which PostgreSQL keeps
// apart from those with one.
func RawKey2(a, b int32) string { return fmt.Sprintf("%s%d,%d", rawPrefix, a, b) }

const rawPrefix = "\x00#"

// shownKey is a key as messages show it.
func shownKey(key string) string {
	if _, raw := parseRaw(key); raw {
		return key[1:]
	}
	return strconv.Quote(key)
}

// advisoryID says which of the server's advisory locks is meant.
type advisoryID struct {
	number int64 // of a pair: the first in the upper half
	pair   bool
}

// space is what PostgreSQL keeps the two kinds of numbers apart by: objsubid in
// pg_locks.
func (id advisoryID) space() int {
	if id.pair {
		return 2
	}
	return 1
}

func (id advisoryID) compare(other advisoryID) int {
	return cmp.Or(cmp.Compare(id.space(), other.space()), cmp.Compare(id.number, other.number))
}

// identify returns the lock that a key names.
func identify(key string) advisoryID {
	if id, raw := parseRaw(key); raw {
		return id
	}
	sum := sha256.Sum256([]byte(key))
	return advisoryID{number: int64(binary.BigEndian.Uint64(sum[:8]))}
}

// parseRaw returns the lock of a key that RawKey or RawKey2 made.
func parseRaw(key string) (id advisoryID, raw bool) {
	text, raw := strings.CutPrefix(key, rawPrefix)
	if !raw {
		return id, false
	}
	if first, second, pair := strings.Cut(text, ","); pair {
		a, err := strconv.ParseInt(first, 10, 32)
		b, err2 := strconv.ParseInt(second, 10, 32)
		id = advisoryID{a<<32 | int64(uint32(b)), true}
		return id, err == nil && err2 == nil && key == RawKey2(int32(a), int32(b))
	}
	number, err := strconv.ParseInt(text, 10, 64)
	return advisoryID{number: number}, err == nil && key == RawKey(number)
}

// checkAdvisoryKey is checkKey for locks that numbers name as well.
func checkAdvisoryKey(key string) error {
	if _, raw := parseRaw(key); raw {
		return nil
	}
	return checkKey(key)
}

// maxText is how many characters a key, an owner or a holder may have: what
// varchar(255) in the table distributed_locks holds.
const maxText = 255

// checkKey says what is wrong with a key, before anything was sent anywhere.
func checkKey(key string) error {
	if _, raw := parseRaw(key); raw {
		return fmt.Errorf("the key is the number of an advisory lock, which only NewAdvisory's locks and LockTx are: %w", errors.ErrUnsupported)
	}
	switch {
	case key == "":
		return errors.New("the key is empty; name what is to be locked, such as \"order:42\"")
	case !utf8.ValidString(key):
		return errors.New("the key is not valid UTF-8; encode binary names, for example in hexadecimal")
	case strings.ContainsRune(key, 0):
		return errors.New("the key contains a zero byte, which PostgreSQL's text cannot hold")
	case utf8.RuneCountInString(key) > maxText:
		return fmt.Errorf("the key has %d characters, %d are allowed; shorten it, for example by a hash", utf8.RuneCountInString(key), maxText)
	}
	return nil
}
