// Package cutnet makes networks between a client and a server that can be cut
// without a word, as when a switch dies or a firewall forgets a connection: no
// end hears of it, nothing is refused, and what is sent is lost.
//
// A Namespace does that to packets, so that both kernels' own timeouts run and
// what TCP repeats in time arrives after Heal. It takes root, Linux and
// iproute2. A Relay works everywhere, on connections: both kernels find the
// network in order, and only a reader of data waits without end. It also lets connections wait
// before the server, and shows a test what a client sends.
package cutnet
