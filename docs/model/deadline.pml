/* Why the other models may say: the server ends a lease only after its holder's deadline (A1).
 *
 * One holder renews over a network that takes any time, and loses answers. Both clocks tick; the
 * server's may be ahead of the holder's by JUMP ticks more, once in the time of a lease. A lease lasts
 * TTL ticks from when the server wrote it; the holder believes for TTL - MARGIN ticks from when it sent
 * the request. lease.pml says how to read Promela.
 *
 * Break it with -DMARGIN=0, or with -DFROM_ANSWER: the deadline is counted from the answer.
 */

#ifndef MARGIN
#define MARGIN 1
#endif
#define TTL  4
#define JUMP 1

byte left = TTL;                /* ticks to expires_at, by the server's clock; 0: expired */
byte believed = TTL - MARGIN;   /* ticks to the deadline, by the holder's */
bool jumped;                    /* in the time of this lease */

mtype = { nothing, request, answer };
mtype message = nothing;
byte age;                       /* ticks since the request was sent */

active proctype Holder()
{
end:	do
	:: atomic { message == nothing && believed > 0 -> message = request; age = 0 }
	:: atomic { message == answer ->
		message = nothing;
		if
		:: believed == 0                        /* a lease that is lost stays lost */
#ifdef FROM_ANSWER
		:: believed > 0 -> believed = TTL - MARGIN
#else
		:: believed > 0 -> believed = (age + MARGIN < TTL -> TTL - MARGIN - age : 0)
#endif
		fi;
		age = 0 }
	od
}

active proctype Server()
{
end:	do
	:: atomic { message == request && left > 0 -> left = TTL; jumped = false; message = answer }
	:: atomic { message != nothing -> message = nothing; age = 0 }  /* refused, or lost */
	od
}

active proctype Clocks()
{
end:	do
	:: atomic { left > 0 ->
		if
		:: true
		:: !jumped -> jumped = true; left = left - JUMP
		fi;
		left = (left > 0 -> left - 1 : 0);
		believed = (believed > 0 -> believed - 1 : 0);
		age = (message != nothing && age < TTL -> age + 1 : age);
		assert(left > 0 || believed == 0) }
	od
}
