//! Links between hosts and API servers, with their faults.

use std::collections::BTreeMap;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

use crate::time::Millis;

/// The state of one direction of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Nothing passes, and the sender does not notice.
    pub cut: bool,
    /// Connections are refused or reset.
    pub refused: bool,
    /// Added to the usual delay.
    pub delay: Millis,
    /// Requests and responses that are lost, per thousand.
    pub loss: u32,
}

/// The fate of a message on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmission {
    /// It arrives after this time.
    Arrives(Millis),
    Lost,
    Refused,
}

/// All links. A link without an entry has no fault.
#[derive(Debug)]
pub struct Links {
    links: BTreeMap<(String, String), Link>,
    generator: Xoshiro256PlusPlus,
}

impl Links {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            links: BTreeMap::new(),
            generator: Xoshiro256PlusPlus::seed_from_u64(seed),
        }
    }

    /// Replaces the state of the direction `from` → `to`.
    pub(crate) fn set(&mut self, from: &str, to: &str, link: Link) {
        let key = (from.to_owned(), to.to_owned());
        if link == Link::default() {
            self.links.remove(&key);
        } else {
            self.links.insert(key, link);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.links.clear();
    }

    /// Decides the fate of a message.
    pub(crate) fn transmit(&mut self, from: &str, to: &str) -> Transmission {
        let usual_delay = self.generator.random_range(1..=8);
        let link = self.link(from, to);
        if link.refused {
            Transmission::Refused
        } else if link.cut || self.generator.random_range(0..1000) < link.loss {
            Transmission::Lost
        } else {
            Transmission::Arrives(usual_delay + link.delay)
        }
    }

    /// Returns whether bytes of an open connection pass at all.
    pub(crate) fn passes(&self, from: &str, to: &str) -> bool {
        let link = self.link(from, to);
        !link.cut && !link.refused
    }

    fn link(&self, from: &str, to: &str) -> Link {
        if self.links.is_empty() {
            return Link::default();
        }
        let key = (from.to_owned(), to.to_owned());
        self.links.get(&key).copied().unwrap_or_default()
    }
}
