package main

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
)

// at returns the moment so many milliseconds after some beginning.
func at(ms int) time.Time { return time.Unix(1700000000, 0).Add(time.Duration(ms) * time.Millisecond) }

// goodTurns is a record in which everything is as it should be.
func goodTurns() []turn {
	return []turn{{"a", 11, 1, at(0), at(10)}, {"b", 12, 1, at(10), at(20)}, {"a", 15, 1, at(25), at(30)}}
}

func goodMix() sqlAndGo {
	return sqlAndGo{sqlAcquired: true, goTried: report{Err: "busy", Busy: true, HeldBy: "psql"}, sqlReleased: true, goTook: report{Token: 4}}
}

func TestTrueClaimsAreFoundTrue(t *testing.T) {
	t.Parallel()
	before := pgxlock.Holder{Key: "k", ID: "a", Expires: at(100)}
	for name, err := range map[string]error{
		"exclusive": checkExclusive(goodTurns(), 3),
		"growing":   checkGrowing(goodTurns()),
		"takeover":  checkTakeover(before, pgxlock.Holder{Key: "k", ID: "b", Since: at(100)}),
		"greater":   checkGreater(11, 12),
		"lost":      checkLost(report{Err: "lost", Lost: true}),
		"refused":   checkRefused(report{Err: "lost", Lost: true}, stateNotHeld, report{}),
		"ledger":    checkLedger([]entry{{"a", 1}, {"b", 2}}, entry{"a", 1}, entry{"b", 2}),
		"mixed":     checkMixed(goodMix(), "psql"),
		"listed":    checkListed([]pgxlock.Holder{{Key: "k", State: "live", ID: "a", Token: 3}}, []held{{"k", "live", "a", 3}}),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEveryUntrueClaimIsFoundUntrue(t *testing.T) {
	t.Parallel()
	turns := func(change func([]turn)) []turn {
		record := goodTurns()
		change(record)
		return record
	}
	mix := func(change func(*sqlAndGo)) error {
		s := goodMix()
		change(&s)
		return checkMixed(s, "psql")
	}
	before := pgxlock.Holder{Key: "k", ID: "a", Expires: at(100)}
	lost := report{Err: "lost", Lost: true}
	for name, err := range map[string]error{
		"two inside":              checkExclusive(turns(func(r []turn) { r[1].Inside = 2 }), 3),
		"overlapping times":       checkExclusive(turns(func(r []turn) { r[1].Entered = at(9) }), 3),
		"a turn is missing":       checkExclusive(goodTurns(), 4),
		"a token repeats":         checkGrowing(turns(func(r []turn) { r[1].Token = 11 })),
		"a token falls":           checkGrowing(turns(func(r []turn) { r[2].Token = 5 })),
		"no tokens":               checkGrowing([]turn{{}}),
		"no turns":                checkGrowing(nil),
		"taken too early":         checkTakeover(before, pgxlock.Holder{Key: "k", ID: "b", Since: at(99)}),
		"never taken":             checkTakeover(before, pgxlock.Holder{Key: "k", ID: "a", Since: at(101)}),
		"the same token":          checkGreater(11, 11),
		"not told":                checkLost(report{}),
		"told something else":     checkLost(report{Err: "network"}),
		"late write passed":       checkRefused(report{}, stateNotHeld, report{}),
		"server let it pass":      checkRefused(lost, "", report{}),
		"nothing to refuse":       checkRefused(lost, stateNotHeld, report{Err: "no table"}),
		"late row in the ledger":  checkLedger([]entry{{"a", 1}, {"b", 2}, {"a", 1}}, entry{"a", 1}, entry{"b", 2}),
		"holder's row is missing": checkLedger([]entry{{"a", 1}}, entry{"a", 1}, entry{"b", 2}),
		"free name refused":       mix(func(s *sqlAndGo) { s.sqlAcquired = false }),
		"Go came in":              mix(func(s *sqlAndGo) { s.goTried = report{Token: 3} }),
		"wrong holder named":      mix(func(s *sqlAndGo) { s.goTried.HeldBy = "" }),
		"not released":            mix(func(s *sqlAndGo) { s.sqlReleased = false }),
		"Go kept out":             mix(func(s *sqlAndGo) { s.goTook = report{Err: "busy", Busy: true} }),
		"SQL came in":             mix(func(s *sqlAndGo) { s.sqlAgain = true }),
		"a lease not listed":      checkListed(nil, []held{{"k", "live", "a", 3}}),
		"the wrong state listed":  checkListed([]pgxlock.Holder{{Key: "k", State: "live", ID: "a", Token: 3}}, []held{{"k", "expired", "a", 3}}),
	} {
		if err == nil {
			t.Errorf("%s: found true", name)
		}
	}
}

func TestUntrueClaimFailsAndIsNotCounted(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	d := &demo{out: &b}
	if err := d.claim("water is wet", nil); err != nil {
		t.Error(err)
	}
	err := d.claim("pigs fly", errors.New("none was seen"))
	if err == nil || err.Error() != "untrue: pigs fly: none was seen" {
		t.Errorf("an untrue claim: %v", err)
	}
	if out := b.String(); d.claims != 1 || out != "  ok  water is wet\n  UNTRUE  pigs fly\n" {
		t.Errorf("%d claims: %s", d.claims, out)
	}
}

func TestVictimsOfTheDemonstrationHaveTimeToRenewOnASlowMachine(t *testing.T) {
	t.Parallel()
	for turn, want := range map[time.Duration]time.Duration{0: 2 * time.Second, 25 * time.Millisecond: 2 * time.Second, time.Second: 30 * time.Second, time.Hour: time.Minute} {
		if got := victimTTL(turn); got != want {
			t.Errorf("turns of %s: %s, want %s", turn, got, want)
		}
	}
}
