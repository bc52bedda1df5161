package pgxlock

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
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
func AdvisoryID(key string) int64 {
	sum := sha256.Sum256([]byte(key))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// maxText is how many characters a key, an owner or a holder may have: what
// varchar(255) in the table distributed_locks holds.
const maxText = 255

// checkKey says what is wrong with a key, before anything was sent anywhere.
func checkKey(key string) error {
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
