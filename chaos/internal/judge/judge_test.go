package judge

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func judge(t *testing.T, text, pictures string) *Report {
	t.Helper()
	report, err := Judge(script(t, text), pictures)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func (r *Report) of(rule string) Verdict {
	i := slices.IndexFunc(r.Verdicts, func(v Verdict) bool { return v.Rule.Name == rule })
	return r.Verdicts[i]
}

// Two holders in turn, of leases.
const inTurn = `
	1 p1#1 ask lease a
	2 p1#1 granted token=1 deadline=10
	3 p2#1 ask lease a
	4 p1#1 held began=3.5
	5 p1#1 release-ask
	6 p1#1 released
	7 p2#1 granted token=2 deadline=15
	8 p2#1 release-ask
	9 p2#1 released
`

// The first holder dies, and the second is granted its lease after the deadline.
const takenOver = `
	1 p1#1 ask lease a
	2 p1#1 granted token=1 deadline=10
	2.5 p1#1 write-ask write=1
	3 p1#1 commit-ask write=1
	4 p1#1 wrote write=1
	9 p1#1 held began=8.9
	10.1 p1#1 lost
	11 p2#1 ask lease a
	12 p2#1 granted token=2 deadline=20
	12.5 p2#1 write-ask write=1
	13 p2#1 commit-ask write=1
	14 p2#1 wrote write=1
	15 p1#1 write-ask write=2
	16 p1#1 write-refused write=2
	30 p1#1 row write=1 token=1 position=1
	30 p2#1 row write=1 token=2 position=2
`

const twoPermits = `
	1 p1#1 ask permit s limit=2
	2 p1#1 granted token=1 deadline=20
	3 p2#1 ask permit s limit=2
	4 p2#1 granted token=2 deadline=20
	5 p3#1 ask permit s limit=2
	6 p1#1 release-ask
	7 p1#1 released
	8 p3#1 granted token=3 deadline=20
	9 p3#1 release-ask
	10 p3#1 released
	11 p2#1 release-ask
	12 p2#1 released
`

const readersAndAWriter = `
	1 p1#1 ask advisory a shared
	2 p1#1 granted
	3 p2#1 ask advisory a shared
	4 p2#1 granted
	5 p3#1 ask advisory a
	6 p1#1 release-ask
	7 p1#1 released
	8 p2#1 release-ask
	9 p2#1 released
	10 p3#1 granted
	11 p3#1 release-ask
	12 p3#1 released
`

// Readers in two processes have tokens of their own, in any order.
const fencedReaders = `
	1 p1#1 ask advisory a shared
	2 p1#1 granted token=4
	3 p2#1 ask advisory a shared
	4 p2#1 granted token=3
	5 p1#1 write-ask write=1
	6 p2#1 write-ask write=1
	7 p2#1 commit-ask write=1
	8 p1#1 commit-ask write=1
	9 p1#1 wrote write=1
	9 p2#1 wrote write=1
	10 p1#1 release-ask
	10 p1#1 released
	11 p2#1 release-ask
	12 p2#1 released
	13 p3#1 ask advisory a
	14 p3#1 granted token=5
	15 p3#1 write-ask write=1
	16 p3#1 commit-ask write=1
	17 p3#1 wrote write=1
	30 p1#1 row write=1 token=4 position=1
	30 p2#1 row write=1 token=3 position=2
	30 p3#1 row write=1 token=5 position=3
`

const claims = `
	1 p1#1 ask claim c
	2 p2#1 ask claim c
	3 p1#1 granted
	4 p1#1 commit-ask
	5 p1#1 committed
	6 p2#1 refused
	7 p3#1 ask claim d
	8 p3#1 granted
	9 p3#1 rolled-back
	10 p3#2 ask claim d
	11 p3#2 granted
	12 p3#2 commit-ask
	13 p3#2 unknown
	14 p2#2 ask claim d
	15 p2#2 refused
`

const periods = `
	1 p1#1 ask once job
	2 p1#1 granted period=noon
	3 p2#1 ask once job
	4 p2#1 refused period=noon
	5 p1#1 released
	6 p2#2 ask once job
	7 p2#2 granted period=evening
	8 p3#1 ask once job
	9 p3#2 ask once job
	10 p3#2 refused period=night
`

const limited = `
	1 p1#1 ask limit l limit=2 rate=1 n=2
	1.1 p1#1 granted
	1.2 p2#1 ask limit l limit=2 rate=1 n=1
	1.3 p2#1 refused
	2.2 p2#2 ask limit l limit=2 rate=1 n=1
	2.3 p2#2 granted
`

const around = `
	1 p1#1 ask lease a try
	2 p1#1 refused
	3 c#0 connections target=p1 n=3
	4 c#0 connections target=p2 n=4 limit=4
	60 c#0 left n=0
`

// A set of two, and one that fails; then nothing of it is left.
const inSets = `
	1 p1#1 ask set a set=9
	1 p1#2 ask set b set=9
	2 p1#1 granted token=1 deadline=20
	2 p1#2 granted token=1 deadline=20
	3 p2#1 ask set b set=8
	3 p2#2 ask set c set=8
	4 p2#1 refused
	4 p2#2 refused
	5 p2#1 left n=0
	6 p1#1 release-ask
	6 p1#2 release-ask
	7 p1#1 released
	7 p1#2 released
`

// A holder is evicted, believes for a while, and another is granted the lease meanwhile.
const evictedLease = `
	1 p1#1 ask lease a
	2 p1#1 granted token=1 holder=h1 ttl=3 deadline=5
	3 c#1 fault fault=evict target=p1 key=a holder=h1
	3.5 c#1 fault-ended
	4 p2#1 ask lease a
	4.5 p2#1 granted token=2 holder=h2 ttl=3 deadline=8
	5 p1#1 held began=4.9
	5.1 p1#1 write-ask write=1
	5.2 p1#1 write-refused write=1
	6 p1#1 lost
	7 p2#1 release-ask
	7.1 p2#1 released
`

const evictedAdvisory = `
	1 p1#1 ask advisory a
	2 p1#1 granted holder=s1
	2.9 p1#1 held began=2.8
	3 c#1 fault fault=evict target=p1 key=a holder=s1
	3.2 p1#1 lost
	3.5 c#1 fault-ended
	4 p1#2 ask advisory a
	4.5 p1#2 granted holder=s1
	5 p1#2 held began=4.9
`

// A leader steps down, the next one resigns.
const inTerms = `
	1 p1#1 ask lead a
	2 p1#1 granted token=1 deadline=30
	3 p2#1 ask step-down a
	3.1 p2#1 granted
	4 p1#1 held began=3.9
	5 p1#1 steps-down
	5 p1#1 release-ask
	6 p2#2 ask lead a
	7 p2#2 granted token=2 deadline=30
	15 p2#2 held began=14.9
	15 p2#2 release-ask
`

// A caller waits for a lock whose holder has it for long.
const longHeld = `
	1 p1#1 ask lease a
	2 p1#1 granted token=1 deadline=4
	3 p2#1 ask lease a
	19 p1#1 held began=18.9
	19 p1#1 release-ask
	19.1 p1#1 released
	20 p2#1 granted token=2 deadline=25
`

// A caller waits while later ones come before it, and is served behind the last of them.
func overtaken(by int) string {
	var text strings.Builder
	text.WriteString("1 p1#0 ask advisory a\n1.1 p1#0 waiting\n")
	for i := 1; i <= by; i++ {
		fmt.Fprintf(&text, "%d p1#%d ask advisory a\n%d.2 p1#%d granted\n%d.3 p1#%d release-ask\n%d.4 p1#%d released\n", 1+i, i, 1+i, i, 1+i, i, 1+i, i)
	}
	fmt.Fprintf(&text, "%d p1#0 granted\n", 2+by)
	return text.String()
}

// Two callers of each of two processes wait all the time. The second process has every nth turn.
func shared(n int) string {
	var events []string
	op := 0
	asked := map[string][]int{}
	ask := func(process string, at float64) {
		op++
		asked[process] = append(asked[process], op)
		events = append(events, fmt.Sprintf("%.3f %s#%d ask lease a", at, process, op))
	}
	for _, process := range []string{"p1", "p1", "p2", "p2"} {
		ask(process, 0.5)
	}
	for i := range 100 {
		process, at := "p1", 1+float64(i)/10
		if i%n == 0 {
			process = "p2"
		}
		ask(process, at)
		events = append(events, fmt.Sprintf("%.3f %s#%d granted token=%d", at+0.01, process, asked[process][0], i+1),
			fmt.Sprintf("%.3f %s#%d release-ask", at+0.02, process, asked[process][0]),
			fmt.Sprintf("%.3f %s#%d released", at+0.03, process, asked[process][0]))
		asked[process] = asked[process][1:]
	}
	return strings.Join(events, "\n")
}

// Each forged history differs from one that is accepted in what its rule forbids.
var forged = []struct {
	name, rule string
	kept       string
	old, with  string // what is forged; empty: broken is the forgery
	broken     string
}{
	{name: "two holders at once", rule: "linearizable", kept: inTurn, old: "7 p2#1 granted", with: "4.5 p2#1 granted"},
	{name: "a grant before the deadline of a dead holder", rule: "linearizable", kept: takenOver, old: "11 p2#1 ask lease a\n\t12 p2#1 granted", with: "9.2 p2#1 ask lease a\n9.5 p2#1 granted"},
	{name: "tokens that go back", rule: "linearizable", kept: inTurn, old: "token=2", with: "token=1"},
	{name: "a writer beside a reader", rule: "linearizable", kept: readersAndAWriter, old: "10 p3#1 granted", with: "7.5 p3#1 granted"},
	{name: "a permit too many", rule: "linearizable", kept: twoPermits, old: "8 p3#1 granted", with: "5.5 p3#1 granted"},
	{name: "a claim of two", rule: "linearizable", kept: claims, old: "6 p2#1 refused", with: "6 p2#1 granted\n6.5 p2#1 committed"},
	{name: "a claim that found nobody's", rule: "linearizable", kept: claims, old: "13 p3#2 unknown", with: "13 p3#2 rolled-back"},
	{name: "a run of two", rule: "linearizable", kept: periods, old: "4 p2#1 refused period", with: "4 p2#1 granted period"},
	{name: "a run that nobody began", rule: "linearizable", kept: periods, old: "8 p3#1 ask once job", with: ""},
	{name: "two writers at once", rule: "I1", kept: inTurn, old: "7 p2#1 granted", with: "4.5 p2#1 granted"},
	{name: "a writer beside a reader, swept", rule: "I1", kept: readersAndAWriter, old: "10 p3#1 granted", with: "7.5 p3#1 granted"},
	{name: "a late belief", rule: "I2", kept: takenOver, old: "15 p1#1 write-ask write=2\n", with: "14.5 p1#1 held began=14\n 15 p1#1 write-ask write=2\n"},
	{name: "a release that noticed nothing", rule: "I2", kept: takenOver, old: "10.1 p1#1 lost\n", with: "13 p1#1 release-ask\n13.1 p1#1 released\n"},
	{name: "a loss that is taken back", rule: "I2", kept: inTurn, old: "4 p1#1 held", with: "3.2 p1#1 lost\n4 p1#1 held"},
	{name: "a smaller token", rule: "I3", kept: takenOver, old: "2 p1#1 granted token=1", with: "2 p1#1 granted token=9"},
	{name: "the token of another", rule: "I3", kept: inTurn, old: "7 p2#1 granted token=2", with: "7 p2#1 granted token=1"},
	{name: "a commit that began too late", rule: "I4", kept: takenOver, old: "3 p1#1 commit-ask write=1\n\t4 p1#1 wrote write=1\n", with: "12.3 p1#1 commit-ask write=1\n"},
	{name: "rows in another order", rule: "I4", kept: takenOver, old: "token=1 position=1", with: "token=1 position=3"},
	{name: "a reader's row behind a writer's", rule: "I4", kept: fencedReaders, old: "token=4 position=1", with: "token=4 position=4"},
	{name: "a reader's commit after a writer's grant", rule: "I4", kept: fencedReaders, old: "8 p1#1 commit-ask write=1\n\t9 p1#1 wrote", with: "14.5 p1#1 commit-ask write=1\n14.6 p1#1 wrote"},
	{name: "a writer with a token below a reader's", rule: "I3", kept: fencedReaders, old: "14 p3#1 granted token=5", with: "14 p3#1 granted token=2"},
	{name: "a refused write that is there", rule: "I4", kept: fencedReaders, old: "9 p1#1 wrote write=1", with: "9 p1#1 write-refused write=1"},
	{name: "a committed write that is not there", rule: "I4", kept: takenOver, old: "30 p1#1 row write=1 token=1 position=1\n", with: ""},
	{name: "a write that is there twice", rule: "I4", kept: takenOver, old: "30 p1#1 row write=1 token=1 position=1\n", with: "30 p1#1 row write=1 token=1 position=1\n30 p1#1 row write=1 token=1 position=1\n"},
	{name: "a try that waits", rule: "I5", kept: around, old: "2 p1#1 refused", with: "12 p1#1 refused"},
	{name: "a lease that stays", rule: "I6", kept: around, old: "left n=0", with: "left n=1"},
	{name: "a call that failed and left a lock", rule: "I6", kept: inSets, old: "left n=0", with: "left n=1"},
	{name: "a waiter that is passed", rule: "I7", kept: overtaken(room), broken: overtaken(room + 1)},
	{name: "a process without turns", rule: "I7", kept: shared(2), broken: shared(50)},
	{name: "a process without turns beside a dead one", rule: "I7", kept: "0.4 p3#1 ask lease a\n" + shared(2), broken: "0.4 p3#1 ask lease a\n" + shared(50)},
	{name: "a waiter that sleeps", rule: "I7", kept: longHeld, old: "19 p1#1 held began=18.9\n\t19 p1#1 release-ask\n\t19.1 p1#1 released\n", with: "4 p1#1 release-ask\n4.1 p1#1 released\n"},
	{name: "sets that wait for each other", rule: "I7", kept: longHeld, broken: "1 p1#1 ask set a set=9\n1 p1#2 ask set b set=9\n1 p2#1 ask set a set=8\n1 p2#2 ask set b set=8\n9 p1#1 withdrawn\n9 p2#1 withdrawn\n9 p1#2 withdrawn\n9 p2#2 withdrawn"},
	{name: "four connections", rule: "I8", kept: around, old: "n=3", with: "n=4"},
	{name: "more connections than the options give", rule: "I8", kept: around, old: "n=4", with: "n=5"},
	{name: "a half of a set", rule: "sets", kept: inSets, old: "2 p1#2 granted token=1 deadline=20", with: "2 p1#2 refused"},
	{name: "a write after an eviction", rule: "evicted", kept: evictedLease, old: "5.2 p1#1 write-refused", with: "5.2 p1#1 wrote"},
	{name: "a lease that an evicted holder renews", rule: "evicted", kept: evictedLease, old: "6 p1#1 lost", with: "6.8 p1#1 held began=6.6"},
	{name: "an advisory lock that is held after an eviction", rule: "evicted", kept: evictedAdvisory, old: "3.2 p1#1 lost", with: "3.8 p1#1 held began=3.7"},
	{name: "a leader that nobody asked to step down", rule: "step-down", kept: inTerms, old: "3 p2#1 ask step-down a", with: "3 p2#1 ask step-down b"},
	{name: "a leader that does not step down", rule: "step-down", kept: inTerms, old: "5 p1#1 steps-down\n\t5 p1#1 release-ask\n\t6 p2#2 ask lead a\n\t7 p2#2 granted token=2 deadline=30\n", with: "10 p1#1 held began=9\n6 p2#2 ask lead a\n"},
	{name: "three of two permits", rule: "permits", kept: twoPermits, old: "8 p3#1 granted", with: "5.5 p3#1 granted"},
	{name: "more than burst and rate", rule: "limits", kept: limited, old: "1.3 p2#1 refused", with: "1.3 p2#1 granted"},
	{name: "a period with two runs", rule: "once", kept: periods, old: "period=evening", with: "period=noon"},
}

func TestForgedHistoriesAreRefusedAndTheirTwinsAccepted(t *testing.T) {
	rules := map[string]bool{}
	for _, c := range forged {
		t.Run(c.rule+"/"+c.name, func(t *testing.T) {
			rules[c.rule] = true
			kept := judge(t, c.kept, "")
			if kept.Violations() > 0 || kept.Unknown() > 0 || kept.of(c.rule).Checked == 0 {
				t.Errorf("the true history is refused, or its rule judged nothing: %+v", kept)
			}
			broken := c.broken
			if broken == "" {
				if broken = strings.Replace(c.kept, c.old, c.with, 1); broken == c.kept {
					t.Fatalf("%q is not in the history", c.old)
				}
			}
			if v := judge(t, broken, "").of(c.rule); len(v.Violations) == 0 {
				t.Errorf("the forged history is accepted by %+v", v)
			} else {
				t.Log(v.Violations[0])
			}
		})
	}
	for _, rule := range Rules {
		if !rules[rule.Name] {
			t.Errorf("no forged history for %s", rule.Name)
		}
	}
}

// What faults excuse, and what they do not.
func TestFaultsExcuseWhatTheyMayDo(t *testing.T) {
	overlap := strings.Replace(inTurn, "7 p2#1 granted", "4.5 p2#1 granted", 1)
	advisory := strings.NewReplacer("ask lease", "ask advisory", "5 p1#1 release-ask", "5 p1#1 lost", "6 p1#1 released", "", "7 p2#1", "3.2 p2#1").Replace(inTurn)
	async := strings.ReplaceAll(advisory, "ask advisory", "ask lease-async")
	again := strings.NewReplacer("refused", "granted", "2.3 p2#2", "2.5 p2#2").Replace(limited) + "1.4 p2#3 ask limit l limit=2 rate=1 n=2\n1.5 p2#3 granted"
	for _, c := range []struct {
		name, text string
		violated   []string
	}{
		{"nothing", overlap, []string{"linearizable", "I1", "I2"}},
		{"a crash does not excuse leases", "0 c#1 fault fault=crash\n" + overlap, []string{"linearizable", "I1", "I2"}},
		{"a clock that jumps", "0 c#1 fault fault=clock-jump\n" + overlap, nil},
		{"a clock that jumps does not excuse tokens", "0 c#1 fault fault=clock-jump\n" + strings.Replace(overlap, "token=2", "token=1", 1), []string{"I3"}},
		{"an advisory lock without a fault", advisory, []string{"linearizable", "I1"}},
		{"an advisory lock whose session ended", "0 c#1 fault fault=terminate\n0.1 c#1 fault-ended\n" + advisory, nil},
		{"a grant that arrives when its session has ended", "0 c#1 fault fault=terminate\n0.1 c#1 fault-ended\n" + strings.NewReplacer(
			"ask lease", "ask advisory", "2 p1#1 granted", "7.5 p1#1 granted", "4 p1#1 held began=3.5", "", "5 p1#1 release-ask", "", "6 p1#1 released", "").Replace(inTurn), nil},
		{"an advisory lock beside a fault of another process", "0 c#1 fault fault=freeze target=p7\n" + advisory, []string{"linearizable", "I1"}},
		{"an async lease in a crash", "3.4 c#1 fault fault=crash\n" + async, nil},
		{"an async lease beside a cut", "3.4 c#1 fault fault=cut\n" + async, []string{"linearizable", "I1", "I2"}},
		{"an eviction beside an eviction of another", "0 c#9 fault fault=evict target=p1 key=a holder=h7\n0.1 c#9 fault-ended\n" + overlap, []string{"linearizable", "I1", "I2"}},
		{"an eviction", "3 c#9 fault fault=evict target=p1 key=a holder=h1\n3.1 c#9 fault-ended\n" + strings.NewReplacer(
			"token=1", "token=1 holder=h1 ttl=3", "5 p1#1 release-ask", "5 p1#1 lost", "6 p1#1 released", "").Replace(overlap), nil},
		{"an eviction that may have failed", strings.Replace(strings.Replace(evictedLease, "3.5 c#1 fault-ended", "3.5 c#1 fault-ended err=gone", 1), "5.2 p1#1 write-refused", "5.2 p1#1 wrote", 1), []string{"I4"}},
		{"a call that left a lock beside a fault", "0 c#9 fault fault=cut\n" + strings.Replace(inSets, "left n=0", "left n=1", 1), nil},
		{"a waiter that sleeps beside a fault", "0 c#9 fault fault=cut\n" + strings.NewReplacer("19 p1#1 held began=18.9", "", "19 p1#1 release-ask", "4 p1#1 release-ask", "19.1 p1#1 released", "4.1 p1#1 released").Replace(longHeld), nil},
		{"a try beside a fault", "0.5 c#1 fault fault=freeze-server\n" + strings.Replace(around, "2 p1#1 refused", "12 p1#1 refused", 1), nil},
		{"a frozen process has no turns", "2 c#1 fault fault=freeze target=p2\n" + shared(50), nil},
		{"a frozen process takes no turns from others", "2 c#1 fault fault=freeze target=p3\n" + shared(50), []string{"I7"}},
		{"a limit over a crash", "1.15 c#1 fault fault=crash\n1.16 c#1 fault-ended\n" + strings.Replace(limited, "refused", "granted", 1), nil},
		{"a limit beyond the burst of a crash", "1.35 c#1 fault fault=crash\n1.36 c#1 fault-ended\n" + again, []string{"limits"}},
		{"a wait for a limit over a crash", "1.35 c#1 fault fault=crash\n1.36 c#1 fault-ended\n" + strings.Replace(again, "1.3 p2#1", "1.38 p2#1", 1), nil},
		{"a limit beside a restart", "1.15 c#1 fault fault=restart\n1.16 c#1 fault-ended\n" + strings.Replace(limited, "refused", "granted", 1), []string{"limits"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, v := range judge(t, c.text, "").Verdicts {
				if len(v.Violations) > 0 {
					got = append(got, v.Rule.Name)
				}
			}
			if !slices.Equal(got, c.violated) {
				t.Errorf("violated %v, want %v", got, c.violated)
			}
		})
	}
}

func TestPictureOfWhatIsNotLinearizableIsKept(t *testing.T) {
	dir := t.TempDir()
	report := judge(t, "0 c#1 fault fault=cut\n"+strings.Replace(inTurn, "7 p2#1 granted", "4.5 p2#1 granted", 1), dir)
	files, err := filepath.Glob(filepath.Join(dir, "*.html"))
	if err != nil || len(files) != 1 {
		t.Fatalf("pictures %v, error %v", files, err)
	}
	if v := report.of("linearizable"); !strings.Contains(v.Violations[0], files[0]) {
		t.Errorf("%q does not name %s", v.Violations[0], files[0])
	}
	if text, err := os.ReadFile(files[0]); err != nil || !strings.Contains(string(text), "p1#1 acquires, token 1") {
		t.Errorf("the picture, %d bytes, does not say who acquires; %v", len(text), err)
	}
}

func TestAnswerToNothingIsNoHistory(t *testing.T) {
	for _, text := range []string{"1 p1#1 granted", "1 p1#1 wrote write=1", "1 c#1 fault-ended", "1 p1#1 ask lease a\n2 p1#1 ask lease a", "1 p1#1 ask lease a\n2 p1#1 robbed"} {
		if _, err := Judge(script(t, text), ""); err == nil {
			t.Errorf("accepted: %s", text)
		}
	}
}
