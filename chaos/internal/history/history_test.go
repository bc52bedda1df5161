package history_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

func create(t *testing.T, dir, process string) *history.Writer {
	t.Helper()
	w, err := history.Create(dir, process)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func TestEventsOfManyGoroutinesAndProcessesAreMerged(t *testing.T) {
	dir := t.TempDir()
	var all sync.WaitGroup
	for _, process := range []string{"p1", "p2"} {
		w := create(t, dir, process)
		for caller := range 8 {
			all.Go(func() {
				for op := range int64(50) {
					w.Write(history.Event{What: history.Ask, Caller: caller, Op: op, Kind: history.Lease, Key: "a", TTL: time.Second})
				}
			})
		}
	}
	all.Wait()
	got, err := history.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 800 {
		t.Fatalf("%d events, want 800", len(got))
	}
	if !slices.IsSortedFunc(got, func(a, b history.Event) int { return int(a.Mono - b.Mono) }) {
		t.Error("the events are not in the order of their clock")
	}
	if e := got[0]; e.Process == "" || e.Wall.IsZero() || e.What != history.Ask || e.TTL != time.Second {
		t.Errorf("the first event is %+v", e)
	}
}

func TestProcessesOfARunHaveDifferentNames(t *testing.T) {
	dir := t.TempDir()
	create(t, dir, "p1")
	if _, err := history.Create(dir, "p1"); err == nil {
		t.Error("two processes write one file")
	}
}

func TestReadLeavesOutATornLastLineAndRefusesAHole(t *testing.T) {
	dir := t.TempDir()
	w := create(t, dir, "p1")
	for op := range int64(3) {
		w.Write(history.Event{What: history.Ask, Op: op + 1})
	}
	name := filepath.Join(dir, "p1.jsonl")
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(whole), "\n")
	for _, c := range []struct {
		name, text string
		events     int // -1: an error
	}{
		{"torn", string(whole[:len(whole)-5]), 2},
		{"torn at its end", string(whole[:len(whole)-1]), 2},
		{"a line is missing", lines[0] + lines[2], -1},
		{"a line is damaged", lines[0] + "{\n" + lines[2], -1},
		{"empty", "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(name, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := history.Read(dir)
			if (err != nil) != (c.events < 0) || err == nil && len(got) != c.events {
				t.Errorf("%d events, error %v", len(got), err)
			}
		})
	}
	if _, err := history.Read(t.TempDir()); err == nil {
		t.Error("a folder without a history was read")
	}
}

// The test runs itself as a process that writes, and prints what it has written.
func TestKilledWriterLosesNoLineThatItHasWritten(t *testing.T) {
	if dir := os.Getenv("HISTORY_TEST_DIR"); dir != "" {
		w := create(t, dir, "child")
		for op := int64(1); ; op++ {
			w.Write(history.Event{What: history.Ask, Op: op, Key: strings.Repeat("k", int(op%500))})
			fmt.Println(op)
		}
	}
	dir := t.TempDir()
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+t.Name()+"$")
	child.Env = append(os.Environ(), "HISTORY_TEST_DIR="+dir)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	written := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if written++; written == 2000 {
			if err := child.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := child.Wait(); err == nil || written < 2000 {
		t.Fatalf("the child ended by itself (%v) after %d lines", err, written)
	}
	got, err := history.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) < written {
		t.Errorf("%d events, though %d had been written", len(got), written)
	}
}

func TestDeadlineIsNeverLaterThanItIs(t *testing.T) {
	before := history.Now()
	d := history.At(time.Now().Add(time.Minute))
	if after := history.Now(); d < before+int64(time.Minute)-int64(time.Second) || d > after+int64(time.Minute) {
		t.Errorf("a minute from %d to %d is %d", before, after, d)
	}
}
