package cutnet

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/leaktest"
)

// killedEnv makes this program one that makes a namespace, says what its cable is
// called, and waits to be killed.
const killedEnv = "CUTNET_TEST_KILLED"

func TestMain(m *testing.M) {
	if os.Getenv(killedEnv) == "" {
		leaktest.Main(m)
	}
	n, err := NewNamespace()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(n.link)
	select {}
}

func namespace(t *testing.T) *Namespace {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	n, err := NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func TestKilledRunLeavesNothing(t *testing.T) {
	t.Parallel()
	living := namespace(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), killedEnv+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var link string
	_, err = fmt.Fscanln(out, &link)
	there := taken(link)
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // it was killed
	if err != nil || !there {
		t.Fatalf("the other run has no cable %q: %v", link, err)
	}
	for deadline := time.Now().Add(15 * time.Minute); taken(link); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s is still there", link)
		}
	}
	if !taken(living.link) {
		t.Error("the cable of a living run is gone")
	}
}

func TestNamespacesDoNotMeet(t *testing.T) {
	t.Parallel()
	a, b := namespace(t), namespace(t)
	listen := func(n *Namespace) net.Listener {
		t.Helper()
		listener, err := n.listen()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = listener.Close() })
		return listener
	}
	toA, toB := listen(a), listen(b)
	if err := a.Cut(); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", toB.Addr().String())
	if err != nil {
		t.Fatalf("cutting one network cut another: %v", err)
	}
	_ = conn.Close()
	if conn, err := net.DialTimeout("tcp", toA.Addr().String(), time.Second); err == nil {
		_ = conn.Close()
		t.Error("a cut network made a connection")
	}
	if _, err := net.Listen("tcp", toB.Addr().String()); err == nil {
		t.Error("the address of a namespace is this machine's as well")
	}
}

func TestEverySlotHasAddressesOfItsOwn(t *testing.T) {
	t.Parallel()
	seen := make(map[string]bool)
	for slot := range slots {
		near, far := addresses(slot)
		if seen[near.String()] || seen[far.String()] {
			t.Fatalf("slot %d: %s, %s are another's", slot, near, far)
		}
		seen[near.String()], seen[far.String()] = true, true
	}
	if near, far := addresses(slots - 1); near.String() != "198.19.255.253" || far.String() != "198.19.255.254" {
		t.Errorf("the last slot has %s and %s", near, far)
	}
}

// listen listens in the namespace.
func (n *Namespace) listen() (listener net.Listener, err error) {
	err = n.inside(func() error {
		listener, err = net.Listen("tcp", net.JoinHostPort(n.Address(), "0"))
		return err
	})
	return listener, err
}
