package dbconn

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// listensAsParent reports whether the process that listens on the Unix-domain socket at
// the other end is the parent of a server process of PostgreSQL with that pid. In another
// pid namespace, or where /proc hides other users' processes, it is not.
func listensAsParent(conn net.Conn, backend int32) bool {
	raw := socketOf(conn)
	if raw == nil {
		return false
	}
	var peer *unix.Ucred
	var failed error
	err := raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err != nil || failed != nil || peer.Pid <= 0 { // 0: it is in no namespace that we see, or no such socket
		return false
	}
	return postgresParent(backend) == peer.Pid
}

// postgresParent returns the parent of a process if that is a server process of
// PostgreSQL, by its title, else 0. A pid that a backend in another namespace has may
// here be that of a pooler's child.
func postgresParent(pid int32) (parent int32) {
	words, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	title := func(word []byte) bool { return bytes.HasPrefix(word, []byte("postgres: ")) }
	if err != nil || !slices.ContainsFunc(bytes.Split(words, []byte{0}), title) { // not always the first word: a loader's come before
		return 0
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// pid (name) state parent ...; the name may contain anything
	var state string
	if _, err := fmt.Sscan(string(stat[bytes.LastIndexByte(stat, ')')+1:]), &state, &parent); err != nil {
		return 0
	}
	return parent
}
