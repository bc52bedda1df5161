package main

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/leaktest"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// programEnv makes this program what make chaos runs.
const programEnv = "CHAOS_TEST_PROGRAM"

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(workerEnv) != "":
		os.Exit(workerMain())
	case os.Getenv(programEnv) != "":
		os.Exit(chaos(strings.Fields(os.Getenv(programEnv)), log.New(os.Stdout, "", 0)))
	}
	leaktest.Main(m)
}

// The same plans each time: other seeds are for make chaos.
func TestAllKindsSurviveChaos(t *testing.T) {
	pgtest.Long(t)
	var out bytes.Buffer
	if code := chaos([]string{"-seed", "1", "-cpu", "40s", "-lasts", "5s", "-dir", t.TempDir()}, log.New(&out, "", 0)); code != 0 {
		t.Errorf("code %d", code)
	}
	t.Log(out.String())
}

// brokenRuns are ways to break the workers on purpose, with rules of which at least one must find it.
var brokenRuns = []struct {
	broken, kind, fault, lasts string
	rules                      []string
}{
	{"unfenced", "lease", "freeze", "6s", []string{"I4"}},
	{"unfenced", "lease", "evict", "6s", []string{"evicted"}},
	{"deaf", "lease", "freeze", "6s", []string{"I1", "I2"}},
	{"deaf", "advisory", "evict", "6s", []string{"evicted", "I1"}}, // as its next operation or another's grant comes first
	{"deaf", "lead", "none", "12s", []string{"step-down"}},
	{"granting", "lease", "freeze", "6s", []string{"linearizable", "I1"}},
	{"unordered", "set", "none", "12s", []string{"I7"}},
	{"partial", "set", "none", "6s", []string{"sets"}},
	{"outside", "dotx", "none", "6s", []string{"I4"}},
	{"refused", "shared", "none", "6s", []string{"linearizable", "I1"}},
}

func TestBrokenLocksAreFound(t *testing.T) {
	pgtest.Long(t)
	for _, c := range brokenRuns {
		t.Run(c.broken+"/"+c.kind, func(t *testing.T) {
			var out bytes.Buffer
			found := func() bool {
				return slices.ContainsFunc(strings.Split(out.String(), "\n"), func(line string) bool {
					rule, _, _ := strings.Cut(line, " ")
					return slices.Contains(c.rules, rule) && strings.Contains(line, "VIOLATED")
				})
			}
			for range 5 { // the first violation may be of another rule
				out.Reset()
				code := chaos([]string{"-broken", c.broken, "-kind", c.kind, "-fault", c.fault, "-lasts", c.lasts, "-for", "5m", "-first", "-dir", t.TempDir()}, log.New(&out, "", 0))
				if code != 1 || found() {
					break
				}
			}
			if !found() {
				t.Errorf("no violation of %v:\n%s", c.rules, out.String())
			}
			if !strings.Contains(out.String(), fmt.Sprintf(" -lasts %s -kind %s -fault %s -broken %s'\n", c.lasts, c.kind, c.fault, c.broken)) {
				t.Errorf("it is not said how to repeat that:\n%s", out.String())
			}
		})
	}
}

func TestSeedDeterminesPlans(t *testing.T) {
	t.Parallel()
	cfg := runConfig{Lasts: time.Second, Seed: 1, Kinds: allKinds, Faults: allFaults}
	other := cfg
	other.Seed = 2
	pairs, differ := map[[2]string]bool{}, false
	for round := range len(allKinds) * len(allFaults) {
		p := newPlan(cfg, round)
		if !reflect.DeepEqual(p, newPlan(cfg, round)) {
			t.Fatalf("round %d has two plans", round)
		}
		differ = differ || !reflect.DeepEqual(p, newPlan(other, round))
		pairs[[2]string{p.Kind, p.Faults[0]}] = true
	}
	if !differ {
		t.Error("another seed has the same plans")
	}
	if want := len(allKinds) * len(allFaults); len(pairs) != want {
		t.Errorf("%d pairs of a kind and a fault in as many rounds as there are pairs, want %d", len(pairs), want)
	}
	for _, fault := range allFaults {
		if faults[fault].do == nil && fault != "none" {
			t.Errorf("no fault is called %s", fault)
		}
	}
}

func TestKilledProgramLeavesNoProcess(t *testing.T) {
	pgtest.Long(t)
	if len(descendants(1)) == 0 {
		t.Skip("this system does not show which processes run")
	}
	program := exec.CommandContext(t.Context(), os.Args[0])
	program.Env = append(os.Environ(), programEnv+"=-kind lease -fault delay -seed 27 -lasts 1h -dir "+t.TempDir())
	out, err := program.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, out)
	}()
	running := func() map[int]time.Duration { return descendants(program.Process.Pid) }
	workers := func() (pids []int) {
		for pid := range running() {
			if env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); bytes.Contains(env, []byte(workerEnv+"=")) {
				pids = append(pids, pid)
			}
		}
		return pids
	}
	pgtest.Until(t, "workers and a server run", func() bool { return len(workers()) >= 2 })
	for _, pid := range workers() { // which then read no end of their input
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	left := running()
	if err := program.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = program.Wait() // it was killed
	<-drained
	pgtest.Until(t, "all that it had started has ended", func() bool {
		for pid := range left {
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
				return false
			}
		}
		return true
	})
}
