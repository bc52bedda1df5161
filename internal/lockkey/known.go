package lockkey

import (
	"hash/maphash"
	"math"
	"sync/atomic"
	"time"
)

// A Known is a set of locks that is read without a mutex. One goroutine at a time changes it.
//
// Any role may send notifications. Those that name no lock of this process must cost it nothing
// but their receipt: no mutex, no memory, no statement.
type Known[K ID | Name] struct {
	table atomic.Pointer[knownTable[K]]
	used  int // slots that are not empty
}

// A knownTable is a hash table with linear probing, whose size is a power of two. When half of
// its slots are used, the next Add makes a new one.
type knownTable[K ID | Name] struct {
	began time.Time // of the first table: when the times in the slots begin
	seed  maphash.Seed
	slots []knownSlot[K]
}

type knownSlot[K ID | Name] struct {
	lock  K
	until atomic.Int64 // 0: the slot is empty; it is set after lock, which then never changes
}

const (
	knownAlways = math.MaxInt64
	leastKnown  = 16
)

// Add adds a lock.
func (k *Known[K]) Add(lock K) {
	t := k.table.Load()
	if t == nil || 2*k.used >= len(t.slots) {
		t = k.renew(t)
	}
	s, until := t.find(lock)
	if until == 0 {
		s.lock = lock
		k.used++
	}
	s.until.Store(knownAlways)
}

// Forget removes a lock, which was added, after a while.
func (k *Known[K]) Forget(lock K, after time.Duration) {
	t := k.table.Load()
	s, _ := t.find(lock)
	s.until.Store(max(t.now()+int64(after), 1))
}

// Has reports whether the lock is in the set. It may be called at any time.
func (k *Known[K]) Has(lock K) bool {
	t := k.table.Load()
	if t == nil {
		return false
	}
	_, until := t.find(lock)
	return until == knownAlways || until != 0 && until > t.now()
}

func (t *knownTable[K]) now() int64 { return int64(time.Since(t.began)) }

// find returns the slot of a lock and the time until which it is in the set; 0: the slot is
// empty, and the lock belongs there.
func (t *knownTable[K]) find(lock K) (s *knownSlot[K], until int64) {
	last := uint64(len(t.slots) - 1)
	for i := maphash.Comparable(t.seed, lock) & last; ; i = (i + 1) & last {
		s = &t.slots[i]
		if until = s.until.Load(); until == 0 || s.lock == lock {
			return s, until
		}
	}
}

// renew makes a table of the locks that are still in the set. At most a quarter of it is used.
func (k *Known[K]) renew(old *knownTable[K]) *knownTable[K] {
	t := &knownTable[K]{began: time.Now(), seed: maphash.MakeSeed()}
	var kept []*knownSlot[K]
	if old != nil {
		t.began = old.began
		now := t.now()
		for i := range old.slots {
			if s := &old.slots[i]; s.until.Load() > now {
				kept = append(kept, s)
			}
		}
	}
	size := leastKnown
	for size < 4*len(kept) {
		size *= 2
	}
	t.slots = make([]knownSlot[K], size)
	for _, from := range kept {
		to, _ := t.find(from.lock)
		to.lock = from.lock
		to.until.Store(from.until.Load())
	}
	k.used = len(kept)
	k.table.Store(t)
	return t
}
