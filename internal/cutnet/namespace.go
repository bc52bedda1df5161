// A namespace at the far end of a virtual cable is a network whose packets a test can drop.

package cutnet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
)

// A Namespace is a machine's worth of network that one cable joins to this
// machine. The cable is cut by addressing what goes into it to nobody: both ends
// send as before, and the kernel drops what arrives.
//
// The namespace has no name, and so lives as long as we or a process in it do,
// and the cable with it: nothing is left of a killed run.
type Namespace struct {
	ns        *os.File
	link      string // our end of the cable; the far end is called farLink
	near, far netip.Addr
}

const (
	farLink = "eth0"

	// The ends' hardware addresses, and one that nobody has.
	nearMAC   = "02:00:00:00:00:01"
	farMAC    = "02:00:00:00:00:02"
	nobodyMAC = "02:00:00:00:00:03"

	// The addresses are those for tests between networks (RFC 2544), four for
	// each cable. The name of a cable says which: who has the name has them.
	slots      = 1 << 15
	linkPrefix = "pgxlock"
	attempts   = 4
)

var firstAddress = netip.MustParseAddr("198.18.0.0")

// NewNamespace makes a namespace. The error says what this machine lacks.
func NewNamespace() (*Namespace, error) {
	ns, err := newNamespace()
	if err != nil {
		return nil, fmt.Errorf("cutnet: namespace: %w", err)
	}
	n := &Namespace{ns: ns}
	if err := n.plug(); err != nil {
		return nil, fmt.Errorf("cutnet: namespace: %w", errors.Join(err, ns.Close()))
	}
	if err := n.configure(); err != nil {
		return nil, fmt.Errorf("cutnet: namespace: %w", errors.Join(err, n.Close()))
	}
	return n, nil
}

// plug makes the cable, in a slot that nobody has.
func (n *Namespace) plug() error {
	for attempt := 1; ; attempt++ {
		slot := rand.IntN(slots)
		n.link = fmt.Sprint(linkPrefix, slot)
		n.near, n.far = addresses(slot)
		err := n.here(fmt.Sprintf("link add %s address %s type veth peer name %s address %s netns /proc/self/fd/3", n.link, nearMAC, farLink, farMAC))
		if err == nil || attempt == attempts || !taken(n.link) {
			return err
		}
	}
}

func taken(link string) bool {
	_, err := net.InterfaceByName(link)
	return err == nil
}

// addresses returns the two of a slot's four that are not its network's.
func addresses(slot int) (near, far netip.Addr) {
	b := firstAddress.As4()
	b[1] += byte(slot >> 14)
	b[2] = byte(slot >> 6)
	b[3] = byte(slot<<2) + 1
	near = netip.AddrFrom4(b)
	return near, near.Next()
}

func (n *Namespace) configure() error {
	if err := n.here("addr add "+n.near.String()+"/30 dev "+n.link, "link set "+n.link+" up"); err != nil {
		return err
	}
	if err := n.there("addr add "+n.far.String()+"/30 dev "+farLink, "link set lo up", "link set "+farLink+" up"); err != nil {
		return err
	}
	return n.Heal()
}

// Address returns the address of the namespace, for servers in it.
func (n *Namespace) Address() string { return n.far.String() }

// Enter takes the thread that calls it into the namespace, for good: it is to be
// locked to its goroutine, and to end with it.
func (n *Namespace) Enter() error { return enter(n.ns) }

// Cut loses all that is sent from now on, in both directions.
func (n *Namespace) Cut() error { return n.lead(nobodyMAC, nobodyMAC) }

// Heal lets packets through again, those that are repeated as well.
func (n *Namespace) Heal() error { return n.lead(farMAC, nearMAC) }

// lead says where each end finds the other. That it never has to ask also keeps
// it from hearing that nobody answers.
func (n *Namespace) lead(far, near string) error {
	const set = "neigh replace %s lladdr %s dev %s nud permanent"
	return errors.Join(
		n.here(fmt.Sprintf(set, n.far, far, n.link)),
		n.there(fmt.Sprintf(set, n.near, near, farLink)),
	)
}

// Close removes the cable. The namespace goes with the last process in it.
func (n *Namespace) Close() error {
	if err := errors.Join(n.here("link del "+n.link), n.ns.Close()); err != nil {
		return fmt.Errorf("cutnet: close: %w", err)
	}
	return nil
}

// here runs commands of iproute2 at our end of the cable.
func (n *Namespace) here(commands ...string) error { return n.ip(commands) }

// there runs commands of iproute2 in the namespace.
func (n *Namespace) there(commands ...string) error {
	return n.inside(func() error { return n.ip(commands) })
}

// inside runs f on a thread in the namespace.
func (n *Namespace) inside(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // without an unlock the thread ends here, instead of taking other work into the namespace
		err := n.Enter()
		if err == nil {
			err = f()
		}
		result <- err
	}()
	return <-result
}

func (n *Namespace) ip(commands []string) error {
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n"))
	cmd.ExtraFiles = []*os.File{n.ns} // its 3
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(commands, "; "), err, strings.TrimSpace(string(output)))
	}
	return nil
}
