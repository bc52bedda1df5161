package pgxlock

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// An Option is a wish for one call. Options are values: they print, compare, and
// can be kept in variables. Of several of one type the last one counts. One that
// the Locker cannot honour is refused with [errors.ErrUnsupported], never
// ignored.
type Option interface{ apply(*options) error }

// MaxWait bounds the wait for a lock, from the call to the grant, connecting
// included; it does not bound how long the lock is held, as a timeout on the
// context would in [Locker.Do]. When it is over the error is [ErrNotAcquired] if
// the server ever said that the key is busy, else the error that kept us from
// asking. Zero or less is [NoWait]. Default: no bound but the context.
type MaxWait time.Duration

// NoWait asks once and does not wait for the holder. Reaching the server may
// still take time; that is bounded by 5 s.
const NoWait = MaxWait(0)

// TTL is how long the lease lasts from its grant and from each renewal, if the
// next renewal does not arrive: the time after which others get the key when
// this process has died. At least 1 s. Default: the Locker's.
type TTL time.Duration

// Metadata is shown to operators beside the lock, and is stored as a JSON
// string. At most 64 KiB as such, of valid UTF-8 without zero bytes.
type Metadata string

// options are the wishes of one call, put together.
type options struct {
	wait     *time.Duration // nil: no bound
	ttl      time.Duration
	metadata *string // JSON
}

func (w MaxWait) apply(o *options) error {
	d := max(time.Duration(w), 0)
	o.wait = &d
	return nil
}

func (w MaxWait) String() string { return "MaxWait(" + time.Duration(w).String() + ")" }

func (t TTL) apply(o *options) error {
	o.ttl = time.Duration(t)
	return checkTTL("TTL", o.ttl)
}

func (t TTL) String() string { return "TTL(" + time.Duration(t).String() + ")" }

const maxMetadata = 64 << 10

func (m Metadata) apply(o *options) error {
	if !utf8.ValidString(string(m)) || strings.ContainsRune(string(m), 0) {
		return errors.New("Metadata must be valid UTF-8 without zero bytes; encode binary data")
	}
	var quoted strings.Builder
	encoder := json.NewEncoder(&quoted)
	encoder.SetEscapeHTML(false) // the server counts characters as they are
	if err := encoder.Encode(string(m)); err != nil {
		return err
	}
	s := strings.TrimSuffix(quoted.String(), "\n")
	if len(s) > maxMetadata {
		return fmt.Errorf("Metadata has %d bytes as a JSON string, %d are allowed; store more elsewhere and name it here", len(s), maxMetadata)
	}
	o.metadata = &s
	return nil
}

// minTTL keeps margins and renewals above what networks and commits take.
// maxTTL is what SQL accepts.
const (
	minTTL = time.Second
	maxTTL = 100 * 360 * 24 * time.Hour // PostgreSQL counts 360 days to a year
)

func checkTTL(name string, ttl time.Duration) error {
	if ttl < minTTL || ttl > maxTTL {
		return fmt.Errorf("%s is %s, it must be between %s and 100 years", name, ttl, minTTL)
	}
	return nil
}

// noWait reports whether the call must not wait for a holder.
func (o *options) noWait() bool { return o.wait != nil && *o.wait == 0 }

// collect puts the options of a call together over its defaults.
func (o *options) collect(opts []Option) error {
	for _, opt := range opts {
		if opt == nil {
			return errors.New("an option is nil; leave it out")
		}
		if err := opt.apply(o); err != nil {
			return err
		}
	}
	return nil
}
