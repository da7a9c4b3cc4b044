//! Random values. No other code of the product draws any.
//!
//! Both functions use the generator of the thread, which is cryptographically secure. In a simulation, [`random`]
//! draws from the simulated process's generator instead, so a seed determines the run.

use rand::distr::{Distribution, StandardUniform};

/// Returns a random value that may be known to others: jitter, or the name of one process or run.
#[allow(
    clippy::disallowed_methods,
    reason = "the one place that draws random values"
)]
pub fn random<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    #[cfg(feature = "simulation")]
    if let Some(world) = crate::world::current() {
        return StandardUniform.sample(&mut simulated::Generator(world));
    }
    rand::random()
}

/// Returns a random value that must stay unpredictable: keys, tokens, salts and serial numbers. No seed of a
/// simulation determines it.
#[allow(
    clippy::disallowed_methods,
    reason = "the one place that draws random values"
)]
pub fn secret<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    rand::random()
}

#[cfg(feature = "simulation")]
mod simulated {
    use std::convert::Infallible;
    use std::rc::Rc;

    use rand::TryRng;

    use crate::world::World;

    /// The generator of a simulated process.
    #[derive(Debug)]
    pub(super) struct Generator(pub(super) Rc<dyn World>);

    impl TryRng for Generator {
        type Error = Infallible;

        fn try_next_u32(&mut self) -> Result<u32, Infallible> {
            let mut bytes = [0; 4];
            self.0.random(&mut bytes);
            Ok(u32::from_le_bytes(bytes))
        }

        fn try_next_u64(&mut self) -> Result<u64, Infallible> {
            let mut bytes = [0; 8];
            self.0.random(&mut bytes);
            Ok(u64::from_le_bytes(bytes))
        }

        fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
            self.0.random(bytes);
            Ok(())
        }
    }
}
