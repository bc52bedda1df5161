package lockkey

import (
	"strconv"
	"strings"
)

// PermitMark stands between the key of a semaphore and the number of a permit. The key and
// the mark are the wait name of all permits.
const PermitMark = "#"

// Permit returns the key of the n-th permit whose wait name is queue.
func Permit(queue string, n int) string { return queue + strconv.Itoa(n) }

// Semaphore returns the key of the semaphore whose permits have that wait name.
func Semaphore(queue string) string { return strings.TrimSuffix(queue, PermitMark) }

// IsSemaphore reports whether callers may wait for a permit under the name.
func (n Name) IsSemaphore() bool { return strings.HasSuffix(n.Key, PermitMark) }
