// Package lockkey knows what a key names: it checks keys, and turns them into the numbers
// of PostgreSQL's advisory locks.
package lockkey

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/pgxlock/pgxlock/internal/oneline"
)

// A Name is equal for two keys that name the same lock.
type Name struct {
	ID  ID     // of an advisory lock
	Key string // of any other lock
}

// Compare orders names.
func (n Name) Compare(other Name) int {
	return cmp.Or(n.ID.Compare(other.ID), strings.Compare(n.Key, other.Key))
}

// Kind returns the kind of the name, as the tables of waiters and evictions have it: 0, or
// the [ID.Space] of an advisory lock.
func (n Name) Kind() int {
	if n.Key != "" {
		return 0
	}
	return n.ID.Space()
}

// Text returns the name as those tables have it.
func (n Name) Text() string {
	if n.Key != "" {
		return n.Key
	}
	return strconv.FormatInt(n.ID.Number, 10)
}

// ParseName returns the name whose Kind and Text, with a colon in between, text is. It does not
// allocate: any role may send the text.
func ParseName(text string) (name Name, ok bool) {
	kind, text, _ := strings.Cut(text, ":")
	switch kind {
	case "0":
		return Name{Key: text}, text != ""
	case "1", "2":
		number, ok := parseNumber(text)
		return Name{ID: ID{Number: number, Pair: kind == "2"}}, ok
	}
	return name, false
}

// parseNumber is strconv.ParseInt, whose errors allocate.
func parseNumber(text string) (n int64, ok bool) {
	digits, negative := strings.CutPrefix(text, "-")
	if digits == "" || len(digits) > len("9223372036854775808") {
		return 0, false
	}
	var sum uint64
	for _, digit := range []byte(digits) {
		if digit < '0' || digit > '9' {
			return 0, false
		}
		sum = 10*sum + uint64(digit-'0')
	}
	if negative {
		return -int64(sum), sum <= 1<<63
	}
	return int64(sum), sum < 1<<63
}

// An ID names one of the server's advisory locks.
type ID struct {
	Number int64 // of a pair: the first in the upper half
	Pair   bool
}

// Space tells one number from a pair of numbers, as objsubid in pg_locks does.
func (id ID) Space() int {
	if id.Pair {
		return 2
	}
	return 1
}

// Compare orders IDs.
func (id ID) Compare(other ID) int {
	return cmp.Or(cmp.Compare(id.Space(), other.Space()), cmp.Compare(id.Number, other.Number))
}

// HeldBy returns how the tables of waiters and evictions name the session with that backend
// as the holder of the lock.
func (id ID) HeldBy(pid int32) string {
	return fmt.Sprintf("advisory:%d:%d:%d", pid, id.Space(), id.Number)
}

// Identify returns the advisory lock that a key names: the number that the key was made
// from, or the first 8 bytes, big endian, of the SHA-256 of its UTF-8 form.
func Identify(key string) ID {
	if id, raw := ParseRaw(key); raw {
		return id
	}
	return hashed([]byte(key))
}

func hashed(text []byte) ID {
	sum := sha256.Sum256(text)
	return ID{Number: int64(binary.BigEndian.Uint64(sum[:8]))}
}

// IdentifyIn is Identify for a key in a namespace: a zero byte, which no name contains, stands between
// the two in what is hashed. An empty namespace is none.
func IdentifyIn(namespace, key string) ID {
	if namespace == "" {
		return Identify(key)
	}
	text := make([]byte, 0, 256)
	return hashed(append(append(append(text, namespace...), 0), key...))
}

// The key of a lock in a namespace stands for its name, as a raw key stands for a number. People write it
// as @namespace/name.
const (
	inPrefix     = "\x00@"
	inSeparator  = "/"
	maxNamespace = 63
)

// In returns the key that stands for a key in a namespace. CheckAdvisory refuses it if one of the
// two is wrong.
func In(namespace, key string) string {
	switch {
	case namespace == "":
		return key
	case strings.Contains(namespace, inSeparator):
		return inPrefix
	}
	return inPrefix + namespace + inSeparator + key
}

// Within returns the namespace of a key, nil for none, and the name in it.
func Within(key string) (namespace *string, name string) {
	if text, in := strings.CutPrefix(key, inPrefix); in {
		space, name, _ := strings.Cut(text, inSeparator)
		return &space, name
	}
	return nil, key
}

// CheckIn returns what is wrong with a namespace, or with a key in it.
func CheckIn(namespace, key string) error {
	if err := CheckNamespace(namespace); err != nil {
		return err
	}
	if strings.HasPrefix(key, "\x00") { // not parsed: that would call this for each namespace in it, and twice
		return errors.New("the key has a namespace already, or is a number, which is the same in every namespace; use it without one")
	}
	if n := utf8.RuneCountInString(namespace) + utf8.RuneCountInString(key) + len("@/"); n > MaxText {
		return fmt.Errorf("the key has %d characters with its namespace, %d are allowed; shorten it, for example by a hash", n, MaxText)
	}
	return Check(key)
}

// CheckNamespace returns what is wrong with a namespace.
func CheckNamespace(namespace string) error {
	if n := utf8.RuneCountInString(namespace); n < 1 || n > maxNamespace || !utf8.ValidString(namespace) || strings.ContainsAny(namespace, "\x00"+inSeparator) {
		return fmt.Errorf("a namespace is valid UTF-8 of 1 to %d characters without / and zero bytes", maxNamespace)
	}
	return nil
}

// A raw key begins with a zero byte, which no name contains.
const rawPrefix = "\x00#"

// Key returns the raw key of an advisory lock, which names it by its number or numbers.
func (id ID) Key() string {
	if id.Pair {
		return fmt.Sprintf("%s%d,%d", rawPrefix, int32(id.Number>>32), int32(id.Number))
	}
	return rawPrefix + strconv.FormatInt(id.Number, 10)
}

// IsNumber reports whether a key is that of a number, or of two.
func IsNumber(key string) bool {
	id, raw := ParseRaw(key)
	return raw && key == id.Key()
}

// ParseRaw returns the lock of a key that is no name: a number, or a name in a namespace.
func ParseRaw(key string) (id ID, raw bool) {
	if namespace, name := Within(key); namespace != nil {
		return IdentifyIn(*namespace, name), CheckIn(*namespace, name) == nil
	}
	text, raw := strings.CutPrefix(key, rawPrefix)
	if !raw {
		return id, false
	}
	if first, second, pair := strings.Cut(text, ","); pair {
		a, err := strconv.ParseInt(first, 10, 32)
		b, err2 := strconv.ParseInt(second, 10, 32)
		id = ID{a<<32 | int64(uint32(b)), true}
		return id, err == nil && err2 == nil && key == id.Key()
	}
	number, err := strconv.ParseInt(text, 10, 64)
	id = ID{Number: number}
	return id, err == nil && key == id.Key()
}

// Split returns a key as people write it, a raw key as #42 or @namespace/name, and whether it is raw.
func Split(key string) (text string, raw bool) {
	if _, raw := ParseRaw(key); raw {
		return key[1:], true
	}
	return key, false
}

// Join returns the key that Split split.
func Join(text string, raw bool) string {
	if raw {
		return rawPrefix[:1] + text
	}
	return text
}

// Shown returns the key as messages show it: quoted and at most so long as a key may be, or a
// raw key as #42.
func Shown(key string) string {
	text, _ := Split(key)
	if IsNumber(key) {
		return text
	}
	return strconv.Quote(oneline.Cut(text, MaxText, "…"))
}

// CheckAdvisory is Check for locks that raw keys name as well.
func CheckAdvisory(key string) error {
	if namespace, name := Within(key); namespace != nil {
		return CheckIn(*namespace, name)
	}
	if _, raw := ParseRaw(key); raw {
		return nil
	}
	return Check(key)
}

// MaxText is how many characters a key, an owner or a holder id may have: what
// varchar(255) in the table distributed_locks holds.
const MaxText = 255

// Check returns what is wrong with a key, before anything is sent.
func Check(key string) error {
	if _, raw := ParseRaw(key); raw {
		return fmt.Errorf("a RawKey names an advisory lock, and so does a key of a Namespace; use it with NewAdvisoryLocker or LockTx: %w", errors.ErrUnsupported)
	}
	switch {
	case key == "":
		return errors.New("the key is empty; name what is to be locked, such as \"order:42\"")
	case !utf8.ValidString(key):
		return errors.New("the key is not valid UTF-8; encode binary names, for example in hexadecimal")
	case strings.ContainsRune(key, 0):
		return errors.New("the key contains a zero byte, which PostgreSQL's text cannot hold")
	case utf8.RuneCountInString(key) > MaxText:
		return fmt.Errorf("the key has %d characters, %d are allowed; shorten it, for example by a hash", utf8.RuneCountInString(key), MaxText)
	}
	return nil
}

// Owner checks the Owner of a configuration; empty is host:pid.
func Owner(config, owner string) (string, error) {
	if owner == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "localhost"
		}
		owner = fmt.Sprintf("%.150s:%d", host, os.Getpid())
	}
	if n := utf8.RuneCountInString(owner); n > 200 || !utf8.ValidString(owner) || owner[0] == '*' || Check(owner) != nil {
		return owner, fmt.Errorf("%s.Owner %.40q must be valid UTF-8 of 1 to 200 characters without zero bytes, not beginning with *", config, owner)
	}
	return owner, nil
}

// PermitMark stands between the key of a semaphore and the number of a permit. The key and
// the mark are the wait name of all permits.
const PermitMark = "#"

// Permit returns the key of the n-th permit whose wait name is queue.
func Permit(queue string, n int) string { return queue + strconv.Itoa(n) }

// Semaphore returns the key of the semaphore whose permits have that wait name.
func Semaphore(queue string) string { return strings.TrimSuffix(queue, PermitMark) }

// IsSemaphore reports whether callers may wait for a permit under the name.
func (n Name) IsSemaphore() bool { return strings.HasSuffix(n.Key, PermitMark) }

// An Ask is what a statement does with one advisory lock, as advisory/prepare.sql and the
// statements of transactions know it.
type Ask int

// What a statement can do.
const (
	AskTry Ask = iota
	AskTryShared
	AskUnlock
	AskUnlockShared

	askPair = 4 // is added for a lock of two numbers
)

// Of returns the number that stands for doing it with that lock.
func (a Ask) Of(id ID) Ask {
	if id.Pair {
		return a + askPair
	}
	return a
}

// OfMigrators returns the number that golang-migrate's drivers for PostgreSQL lock while they
// migrate, as GenerateAdvisoryLockId in its package database makes it. Its library calls the
// database by its name, and its command by its name after a slash.
func OfMigrators(database, schema, table string) int64 {
	const salt = 1486364155
	return int64(crc32.ChecksumIEEE([]byte(schema+"\x00"+table+"\x00"+database)) * salt)
}
