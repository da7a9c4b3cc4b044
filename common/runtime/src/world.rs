//! Replaces the clock, the randomness, the API servers and the threads of a simulated process. Only with the feature
//! `simulation`: without it, or outside a world, every function calls the real thing.
//!
//! A thread runs one simulated process at a time. Everything that the process does on this thread happens in its
//! world.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Config;
use kube::client::ClientBuilder;

use crate::access::transport::Transport;

/// Surroundings of a simulated process.
pub trait World: fmt::Debug {
    /// Fills `bytes` from the process's generator.
    fn random(&self, bytes: &mut [u8]);

    /// Connects to the API server that `config` names.
    fn transport(&self, config: Config) -> Result<ClientBuilder<Transport>, kube::Error>;

    /// Returns the time since boot, including suspension.
    fn boot_time(&self) -> Duration;

    fn wall(&self) -> Timestamp;
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<dyn World>>> = const { RefCell::new(None) };
}

/// Returns the world of the process that runs on this thread. `None` outside a simulation.
pub fn current() -> Option<Rc<dyn World>> {
    // While the thread ends, the variable may be gone already.
    let world = CURRENT.try_with(|world| world.borrow().clone());
    world.ok().flatten()
}

/// Puts this thread into `world` until the result is dropped.
#[must_use]
pub fn enter(world: Rc<dyn World>) -> WorldGuard {
    WorldGuard {
        previous: CURRENT.replace(Some(world)),
    }
}

/// Restores the thread's previous world on drop.
#[derive(Debug)]
pub struct WorldGuard {
    previous: Option<Rc<dyn World>>,
}

impl Drop for WorldGuard {
    fn drop(&mut self) {
        CURRENT.set(self.previous.take());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::clock::BootTime;
    use crate::{access, chance, clock, off_thread};

    /// Counts the bytes that the process draws.
    #[derive(Debug, Default)]
    struct Counting(Cell<u8>);

    impl World for Counting {
        fn random(&self, bytes: &mut [u8]) {
            for byte in bytes {
                *byte = self.0.get();
                self.0.set(self.0.get().wrapping_add(1));
            }
        }

        fn transport(&self, _: Config) -> Result<ClientBuilder<Transport>, kube::Error> {
            Err(kube::Error::TlsRequired)
        }

        fn boot_time(&self) -> Duration {
            Duration::from_secs(7)
        }

        fn wall(&self) -> Timestamp {
            Timestamp::UNIX_EPOCH
        }
    }

    #[test]
    fn world_determines_chance_but_no_secret() {
        let guard = enter(Rc::new(Counting::default()));
        assert_eq!(chance::random::<u32>(), 0x0302_0100);
        assert_eq!(chance::random::<u64>(), 0x0b0a_0908_0706_0504);
        assert_eq!(chance::random::<[u8; 2]>().len(), 2);
        let secrets: [u128; 2] = [chance::secret(), chance::secret()];
        assert_ne!(secrets[0], secrets[1]);
        drop(guard);
        assert!(current().is_none());
    }

    #[test]
    fn world_determines_both_clocks() {
        let _guard = enter(Rc::new(Counting::default()));
        assert_eq!(BootTime::now(), BootTime(Duration::from_secs(7)));
        assert_eq!(clock::wall(), Timestamp::UNIX_EPOCH);
    }

    #[tokio::test]
    async fn world_makes_transports_of_clients() {
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let config = Config::new("http://127.0.0.1:1".parse().unwrap());
        assert!(access::new_client(config.clone(), "test/1").is_ok());
        let _guard = enter(Rc::new(Counting::default()));
        let result = access::new_client(config, "test/1");
        assert!(matches!(result, Err(kube::Error::TlsRequired)));
    }

    #[tokio::test]
    async fn blocking_work_stays_on_the_thread() {
        let _guard = enter(Rc::new(Counting::default()));
        let current_thread = std::thread::current().id();
        let work_thread = off_thread::run(|| std::thread::current().id()).await;
        assert_eq!(work_thread, current_thread);
        let result = off_thread::start(|| panic!("of a test")).await;
        assert!(result.unwrap_err().is_panic());
    }

    #[test]
    fn leaving_a_world_restores_the_outer_one() {
        let previous: Rc<dyn World> = Rc::new(Counting::default());
        let _outer = enter(Rc::clone(&previous));
        drop(enter(Rc::new(Counting::default())));
        assert!(current().is_some_and(|world| Rc::ptr_eq(&world, &previous)));
    }
}
