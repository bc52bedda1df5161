package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// The keys that one session holds, and those of them that others want. The rest
// makes it die slowly: the server frees one lock after the other.
const (
	heldKeys   = 2000
	wantedKeys = 40
	sharedKeys = wantedKeys / 4 // of those, the first ones are held shared
)

// A session that holds many locks is terminated while workers write under them,
// at every isolation level, in transactions that are fenced before, during and
// after that; and heirs take the locks as soon as they can be had and write, too.
// A session that commits must still be the holder at that moment, and no write may
// follow one with a higher token.
func TestSoakZombiesOfADyingSessionDoNotCommit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	rounds := pgtest.Soak(t, 4, 200)
	d := install(t)
	d.do(fmt.Sprintf(`
		create table resource (id bigint primary key, token bigint not null, session bigint, under bigint);
		insert into resource select id, 0 from generate_series(0, %d) id;
		create function still_held() returns trigger language plpgsql as $$
		begin
		  if current_setting('transaction_isolation') = 'read committed' -- else the snapshot shows the past
		     and not exists (select from pgxlock_advisory_locks where key_id = new.id and session = new.session and token = new.under) then
		    raise 'session %% with token %% commits after a take-over', new.session, new.under using errcode = 'ZZ001';
		  end if;
		  return null;
		end $$;
		create constraint trigger still_held after update on resource
		  deferrable initially deferred for each row execute function still_held()`, wantedKeys))

	random := func() *rand.Rand { return rand.New(rand.NewPCG(rand.Uint64(), 0)) }
	var workers, heirs []*writer
	for range 6 {
		workers = append(workers, &writer{worker: &worker{session: d.connect(), random: random()}})
	}
	for range 3 {
		heirs = append(heirs, &writer{worker: &worker{session: d.connect(), random: random()}, holder: d.holder()})
	}
	var inherited int64
	for round := range rounds {
		if t.Failed() {
			break
		}
		inherited += dying(d, workers, heirs, round%2 == 1)
		if rand.N(3) == 0 {
			d.do("select pgxlock_reap_advisory(10000)") // else the next holder removes what the last one left
		}
	}
	t.Logf("%d locks taken over in %d rounds", inherited, rounds)
}

// dying is the life and death of one session, which may free its locks as slowly
// as one does that gets no processor. It returns how many of them were taken over.
func dying(d *database, workers, heirs []*writer, slowly bool) int64 {
	d.t.Helper()
	h := d.holder()
	tokens := h.lockMany(d.t)

	var written, inherited atomic.Int64
	over := make(chan struct{}) // all that was wanted has been taken over
	var wg sync.WaitGroup
	for _, w := range workers {
		w.holder = h
		wg.Go(func() {
			for late := 0; late < 5 && !d.t.Failed(); {
				id := w.random.IntN(wantedKeys)
				if w.write(int64(id), tokens[id]) {
					written.Add(1)
				}
				select {
				case <-over:
					late++
				default:
				}
			}
		})
	}
	var left sync.WaitGroup
	taken := make([]atomic.Bool, wantedKeys)
	for _, heir := range heirs {
		left.Go(func() {
			heir.inherit(taken, &inherited)
		})
	}
	for written.Load() < 20 && !d.t.Failed() {
		d.do("select 1")
	}
	if slowly {
		h.do(fmt.Sprintf(`do $$ declare id bigint; begin
			for id in select i from generate_series(0, %d) i order by random() loop
			  perform case when id < %d then pg_advisory_unlock_shared(id) else pg_advisory_unlock(id) end, pg_sleep(0.001);
			end loop;
		  end $$`, wantedKeys-1, sharedKeys))
	}
	d.do(fmt.Sprintf("select pg_terminate_backend(%d)", h.pid))
	left.Wait()
	close(over)
	wg.Wait()
	for _, heir := range heirs {
		heir.giveBack()
	}
	return inherited.Load()
}

// lockMany locks all the keys.
func (h *holder) lockMany(t *testing.T) (tokens []int64) {
	t.Helper()
	var entries []entry
	for id := range int64(heldKeys) {
		op := lock
		if id < sharedKeys {
			op = lockShared
		}
		if entries = append(entries, entry{op, id}); len(entries) < 250 {
			continue
		}
		for _, answer := range h.answers(entries...) {
			token, err := strconv.ParseInt(answer, 10, 64)
			if err != nil {
				t.Errorf("a lock that is free: %s", answer)
			}
			tokens = append(tokens, token)
		}
		entries = entries[:0]
	}
	return tokens
}

// writer writes under the locks of a holder that it does not control.
type writer struct {
	*worker
	holder *holder
	mine   []entry // of an heir: what it has to give back
}

// write writes once under a lock. It tells whether it committed.
func (w *writer) write(id, token int64) bool {
	w.do("begin isolation level " + levels[w.random.IntN(len(levels))])
	if w.chance(4) {
		w.do("select 1") // the snapshot
	}
	if w.chance(2) {
		w.pause()
	}
	ok := w.may(w.session, "select "+w.holder.fence(id, token))
	if ok && w.chance(2) {
		w.pause()
	}
	if ok {
		order, says := "", ""
		if token > 0 {
			order = fmt.Sprintf(", token = %d", token)
			says = fmt.Sprintf(" and token <= %d", token)
		}
		ok = w.may(w.session, fmt.Sprintf(`do $$ begin
			  update resource set session = %d, under = %d%s where id = %d%s;
			  if not found then raise 'token %[2]d is written after a higher one' using errcode = 'ZZ002'; end if;
			end $$`, w.holder.number, token, order, id, says))
	}
	if !ok {
		w.do("rollback")
		return false
	}
	return w.may(w.session, "commit")
}

// inherit takes over whatever of the wanted keys it can get, until all are
// taken, and writes under some.
func (w *writer) inherit(taken []atomic.Bool, count *atomic.Int64) {
	for !w.t.Failed() {
		var entries []entry
		for id := range taken {
			if !taken[id].Load() {
				entries = append(entries, entry{lock, int64(id)})
			}
		}
		if len(entries) == 0 {
			return
		}
		w.random.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
		entries = entries[:1+w.random.IntN(len(entries))]
		for i, answer := range w.holder.answers(entries...) {
			token, err := strconv.ParseInt(answer, 10, 64)
			if err != nil {
				continue
			}
			w.mine = append(w.mine, entry{unlock, entries[i].id})
			taken[entries[i].id].Store(true)
			count.Add(1)
			w.write(entries[i].id, token)
		}
	}
}

func (w *writer) giveBack() {
	for _, answer := range w.holder.answers(w.mine...) {
		if len(w.mine) > 0 && answer != "1" {
			w.t.Errorf("an unlock: %s", answer)
		}
	}
	w.mine = nil
}
