//! Connections without an agent's certificate: a bounded number, of which the oldest makes room for the next.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Whether a connection has brought a whole request.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked(Arc<AtomicBool>);

impl Asked {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Stranger {
    address: IpAddr,
    asked: Asked,
    cut: CancellationToken,
}

type Here = BTreeMap<u64, Stranger>;

/// Present strangers by number, the oldest first.
#[derive(Debug)]
pub(super) struct Strangers {
    /// The most in total, and from one address.
    limits: [usize; 2],
    here: Mutex<(u64, Here)>,
}

/// Why a stranger had to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    All,
    Address,
}

impl Strangers {
    pub(super) fn new(of_all: usize, of_address: usize) -> Arc<Self> {
        Arc::new(Self {
            limits: [of_all.max(1), of_address.max(1)],
            here: Mutex::default(),
        })
    }

    /// Admits one more. Returns the limit for which another had to make room, if any.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> (StrangerPlace, Option<Full>) {
        let mut here = self.lock();
        let full = self.make_room(&mut here.1, address);
        here.0 += 1;
        let number = here.0;
        let (asked, cut) = (Asked::default(), CancellationToken::new());
        let stranger = Stranger {
            address,
            asked: asked.clone(),
            cut: cut.clone(),
        };
        here.1.insert(number, stranger);
        let place = StrangerPlace {
            asked,
            cut,
            number,
            strangers: Arc::clone(self),
        };
        (place, full)
    }

    fn make_room(&self, here: &mut Here, address: IpAddr) -> Option<Full> {
        let [of_all, of_address] = self.limits;
        let (victim, full) = if count(here, address) >= of_address {
            (oldest(here, Some(address)), Full::Address)
        } else if here.len() >= of_all {
            // A connection with a request goes last, and then from the most crowded address.
            let idle = here.iter().find(|(_, stranger)| !stranger.asked.get());
            let idle = idle.map(|(number, _)| *number);
            (idle.or_else(|| oldest(here, most_of(here))), Full::All)
        } else {
            return None;
        };
        let victim = here.remove(&victim?)?;
        victim.cut.cancel();
        Some(full)
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Here)> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn count(here: &Here, address: IpAddr) -> usize {
    let of_address = here.values().filter(|other| other.address == address);
    of_address.count()
}

/// The oldest of an address, of those without a request if there is one.
fn oldest(here: &Here, address: Option<IpAddr>) -> Option<u64> {
    let of_address = || {
        let all = here.iter();
        all.filter(move |(_, stranger)| Some(stranger.address) == address)
    };
    let idle = of_address().find(|(_, stranger)| !stranger.asked.get());
    idle.or_else(|| of_address().next())
        .map(|(number, _)| *number)
}

fn most_of(here: &Here) -> Option<IpAddr> {
    let addresses = here.values().map(|stranger| stranger.address);
    addresses.max_by_key(|address| count(here, *address))
}

/// A stranger's place, until it is dropped.
pub(super) struct StrangerPlace {
    pub(super) asked: Asked,
    /// Its place is needed.
    pub(super) cut: CancellationToken,
    number: u64,
    strangers: Arc<Strangers>,
}

impl Drop for StrangerPlace {
    fn drop(&mut self) {
        self.strangers.lock().1.remove(&self.number);
    }
}

impl fmt::Debug for StrangerPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StrangerPlace").field(&self.number).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(last: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, last).into()
    }

    #[test]
    fn oldest_stranger_of_a_full_address_makes_room() {
        let strangers = Strangers::new(10, 2);
        let [one, two] = [(); 2].map(|()| strangers.enter(address(1)).0);
        let other = strangers.enter(address(2)).0;
        let (three, full) = strangers.enter(address(1));
        assert_eq!(full, Some(Full::Address));
        let cut = [&one, &two, &three, &other].map(|place| place.cut.is_cancelled());
        assert_eq!(cut, [true, false, false, false]);
    }

    #[test]
    fn stranger_with_request_outlasts_idle_one_when_full() {
        let strangers = Strangers::new(3, 3);
        let enter = |last| strangers.enter(address(last)).0;
        let (asked, idle, also_idle) = (enter(1), enter(2), enter(2));
        asked.asked.set();
        let (next, full) = strangers.enter(address(3));
        assert_eq!(full, Some(Full::All));
        let cut = [&asked, &idle, &also_idle, &next].map(|place| place.cut.is_cancelled());
        assert_eq!(cut, [false, true, false, false]);
    }

    #[test]
    fn crowded_address_makes_room_when_all_have_asked() {
        let strangers = Strangers::new(3, 3);
        let enter = |last| strangers.enter(address(last)).0;
        let (single, first, second) = (enter(1), enter(2), enter(2));
        for place in [&single, &first, &second] {
            place.asked.set();
        }
        let _next = enter(3);
        let cut = [&single, &first, &second].map(|place| place.cut.is_cancelled());
        assert_eq!(cut, [false, true, false]);
    }

    #[test]
    fn departed_strangers_leave_their_places() {
        let strangers = Strangers::new(1, 1);
        for last in 0..100 {
            let (_place, full) = strangers.enter(address(last));
            assert_eq!(full, None);
        }
    }
}
