/* Two keys: three processes hold and wait, as AcquireAll does. With one order for all callers each gets
 * both; with -DANY_ORDER spin finds processes that wait for each other. What a single key does is in
 * lease.pml: here an acquire is one step, and nothing expires but what a dead process had.
 */

byte holder[2];         /* of each key; 0: free */
bool dead[4];
byte crashes = 1;

proctype Process(byte me)
{
	byte first, i;

	{ skip;
#ifdef ANY_ORDER
	if :: first = 0 :: first = 1 fi;
#endif
	atomic { holder[first] == 0 -> holder[first] = me };
	atomic { holder[1 - first] == 0 -> holder[1 - first] = me };
	assert(holder[0] == me && holder[1] == me);
	atomic { holder[0] = 0; first = 0 };
	holder[1] = 0
	} unless { dead[me] }
}

active proctype Faults()
{
	byte p = 1;
end:	do
	:: atomic { crashes > 0 -> crashes--;
		do :: p < 3 -> p++ :: break od;
		dead[p] = true; p = 1 }
	:: atomic { holder[0] != 0 && dead[holder[0]] -> holder[0] = 0 }        /* the TTL is over */
	:: atomic { holder[1] != 0 && dead[holder[1]] -> holder[1] = 0 }
	od
}

init { atomic { run Process(1); run Process(2); run Process(3) } }
