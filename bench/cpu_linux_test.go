package main

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
)

// shell starts a shell that runs a script, and returns its process id and its lines.
func shell(t *testing.T, script string) (pid int, lines *bufio.Scanner, stdin io.WriteCloser) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if stdin, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		cancel()
		_ = cmd.Wait() // it was killed
	})
	return cmd.Process.Pid, bufio.NewScanner(stdout), stdin
}

func TestChildThatHasEndedCounts(t *testing.T) {
	pid, lines, _ := shell(t, "(i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done); echo done; read x")
	if !lines.Scan() {
		t.Fatal("the shell ended")
	}
	own, err := processTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	all, err := familyTime(pid)
	if err != nil || all < own+tick {
		t.Errorf("the shell used %s, with its child %s: %v", own, all, err)
	}
}

func TestChildThatRunsCounts(t *testing.T) {
	pid, lines, stdin := shell(t, "(while read x; do i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo done; done); exit")
	before, err := familyTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(stdin, "go\n"); err != nil || !lines.Scan() {
		t.Fatal("the shell ended", err)
	}
	own, errOwn := processTime(pid)
	after, err := familyTime(pid)
	if err != nil || errOwn != nil || after <= before || after <= own {
		t.Errorf("the shell and its child used %s, then %s, the shell alone %s: %v, %v", before, after, own, err, errOwn)
	}
}

func TestThisProcessCounts(t *testing.T) {
	count, err := countUsage(0)
	if err != nil {
		t.Fatal(err)
	}
	for { // busy until it shows
		used, err := count()
		if err != nil {
			t.Fatal(err)
		}
		if used.server != 0 {
			t.Fatalf("no server used %s", used.server)
		} else if used.client > time.Millisecond {
			return
		}
	}
}

// It looks through all processes of the machine.
func TestCountingIsNotCounted(t *testing.T) {
	var counted, all time.Duration
	for range 10 {
		before, err := ownTime()
		if err != nil {
			t.Fatal(err)
		}
		count, err := countUsage(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		used, err := count()
		if err != nil {
			t.Fatal(err)
		}
		after, err := ownTime()
		if err != nil {
			t.Fatal(err)
		}
		counted, all = counted+used.client, all+after-before
	}
	if counted > all/4 {
		t.Errorf("of %s that counting took, %s counted", all, counted)
	}
}

func TestProcessThatIsGoneIsAnError(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if used, err := familyTime(cmd.Process.Pid); err == nil {
		t.Errorf("it used %s", used)
	}
}

func TestProcessHasANameThatMayHoldAnything(t *testing.T) {
	line := "4711 (a) b (c 9 9) S 17 4711 4711 0 -1 4194560 1 2 3 4 100 200 7 8 20 0 1 0\n"
	pid, p, err := parseStat([]byte(line))
	if err != nil || pid != 4711 || p.parent != 17 || p.reaped != 15*tick {
		t.Errorf("process %d, %+v: %v", pid, p, err)
	}
	if _, _, err := parseStat([]byte("4711 (a) S 17")); err == nil {
		t.Error("half a line is no error")
	}
}
