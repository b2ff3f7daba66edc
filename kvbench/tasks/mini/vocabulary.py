"""The words of `mini`'s generated text: our own lists, more than 2,100 different words, and made-up names and values.

No word is taken from a data set. Towns, people, labels, digits and hexadecimal strings are made up.

The lists determine the samples: whoever changes a word must also increment `Mini.version`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbench.tasks.mini.rng import Rng

PEOPLE = """
actor admiral advocate apprentice archer architect artist astronomer baker barber bargeman beekeeper beggar binder
blacksmith boatman bookseller botanist bricklayer brewer builder butcher butler captain carpenter carter cartographer
cellist chandler chemist clerk clockmaker coachman cobbler collector composer cook cooper courier cousin cyclist dancer
dealer dentist diver doctor drummer dyer editor electrician engineer engraver farmer ferryman fiddler firefighter
fisherman fletcher florist forester gardener geologist glazier goldsmith governor grocer guard guide gunner harper
hatter helmsman herald historian hunter innkeeper inspector inventor ironmonger janitor jeweller joiner juggler judge
knight lamplighter landlord lawyer librarian locksmith magician mason mayor mechanic merchant messenger midwife miller
miner minister musician navigator neighbour nurse officer organist painter pedlar pharmacist physician pilot plumber
poet porter postman potter printer professor publisher quarryman ranger reporter rider sailor saddler scholar sculptor
secretary sergeant shepherd shipwright shopkeeper signalman singer smuggler soldier spinner steward stonecutter
stranger student surgeon surveyor swimmer tailor tanner teacher thatcher tinker tourist trader traveller treasurer
trumpeter tutor typist usher violinist visitor waiter warden watchman weaver wheelwright widow witness woodcutter writer
""".split()

ANIMALS = """
antelope badger bat bear beaver beetle bison blackbird boar bull bullfinch butterfly buzzard camel canary cat cheetah
chicken cobra cod crab crane cricket crow cuckoo curlew deer dog dolphin donkey dormouse dove dragonfly duck eagle eel
elephant elk falcon ferret finch firefly flamingo fox frog gazelle gecko goat goldfish goose grasshopper gull hamster
hare hawk hedgehog heron herring hornet horse ibis jackal jackdaw jay kestrel kingfisher kitten ladybird lamb lark
leopard lion lizard lobster lynx magpie mallard marten mole monkey moose moth mouse mule newt nightingale octopus otter
owl ox oyster panther parrot partridge peacock pelican penguin pheasant pig pigeon plover pony porcupine quail rabbit
raccoon ram rat raven robin rooster salamander salmon seal sheep shrew skylark snail snake sparrow spider squirrel stag
starling stoat stork swallow swan swift tiger toad tortoise trout turkey turtle viper vole vulture walrus wasp weasel
whale wolf woodpecker worm wren zebra
""".split()

FOODS = """
almond apple apricot bacon bagel banana barley bean beetroot berry biscuit bread broth bun butter cabbage cake candy
carrot cashew celery cereal cheese cherry chestnut chocolate chutney cider cinnamon cocoa coffee cookie corn cracker
cream cucumber currant curry custard date dough dumpling eggplant fennel fig flour fudge garlic ginger grape gravy ham
hazelnut honey jam jelly juice kale ketchup leek lemon lentil lettuce lime loaf marmalade marzipan melon milk mint
muffin mushroom mustard mutton noodle nougat nutmeg oatmeal olive omelette onion orange pancake paprika parsley parsnip
pasta pastry peach peanut pear pepper pickle pie pistachio plum popcorn porridge potato pretzel pudding pumpkin quince
radish raisin raspberry rhubarb rice saffron sage salad sandwich sauce sausage scone sesame soup spinach stew
strawberry sugar syrup tart tea thyme toast toffee tomato treacle turnip vanilla vinegar waffle walnut wheat yogurt
""".split()

TOOLS = """
anchor anvil apron arrow awl axe axle bag ball barrel basin basket bell bellows belt bicycle blanket blade board boat
bolt book boot bottle bowl box bracelet bracket brick bridle broom brush bucket buckle button cable cage camera candle
canoe canvas cap cape card carpet cart casket chain chair chalk chart chest chisel clamp cloak clock cloth coat coin
collar comb compass cork crate crown cup curtain cushion dagger desk dial dice dish doll drawer drill drum easel
envelope fan feather fiddle file flag flask flute fork frame funnel furnace gauge gear glass glove goblet grater grinder
guitar hammer handle harness harp hat helmet hinge hoe hook horn hose hourglass inkwell jar jug kettle key kite knife
knot label ladder ladle lamp lantern lathe leash ledger lens letter lever lid loom lute magnet mallet map marble mask
mast mat match medal mirror mitten mop mortar motor mug nail napkin necklace needle net notebook oar oven paddle padlock
pail pan parcel pedal pen pencil pendulum piano pillow pin pipe pitcher plank plate pliers plough pocket pot pouch
propeller pulley pump purse quill quilt rack radio raft rake razor reel ribbon ring rod rope rudder rug ruler sack
saddle
sail saw scale scarf scissors scoop screw scroll scythe shawl shelf shield shirt shoe shovel shutter sickle sieve
signpost skate sled spade spear spindle spoon spring spur stamp stick stool stove strap string suitcase sundial sword
table tablecloth tape tent thermometer thimble thread ticket tile tongs torch towel toy tray tripod trolley trombone
trowel trumpet trunk tube tweezers umbrella urn valve vase veil violin wagon wallet watch wedge wheel wheelbarrow
whistle wick wire wrench yoke zipper
""".split()

PLACES = """
abbey alley arcade arch attic avenue bakery balcony barn barracks basement bay beach bridge brook bungalow cabin camp
canal canyon castle cathedral cave cellar chapel church cinema city cliff coast college colony corner corridor cottage
courtyard cove creek crossing dairy dale dam den depot desert district ditch dock dune embankment estate factory fair
farm ferry field fjord foothill ford forest forge fort foundry fountain gallery garage garden gate glacier glade gorge
granary grove gully hall hamlet harbour headland heath hedge highway hill hospital hotel house hut inlet inn island
junction kennel kitchen laboratory lagoon lake landing lane library lighthouse lodge manor market marsh meadow mill mine
moat monastery monument moor mountain museum nursery oasis observatory office orchard palace parish park parlour passage
pasture path pavement pavilion peninsula pharmacy pier plain plateau platform plaza pond pool port prairie prison
quarry quay railway ravine reef refuge reservoir ridge river road ruin school seaside shed shipyard shore shrine square
stable stadium staircase station stream street studio summit swamp tavern temple terrace theatre tower town track trail
treasury tunnel university valley veranda viaduct village vineyard volcano warehouse waterfall wharf windmill wood
workshop yard
""".split()

MATERIALS = """
amber ash bamboo brass bronze cardboard cedar cement clay coal copper coral cotton crystal denim ebony enamel felt flint
gold granite gravel iron ivory jade lace lead leather linen limestone mahogany maple nickel oak paper pearl pewter pine
plaster plastic porcelain quartz rubber sand sandstone satin silk silver slate steel straw teak tin velvet walnut wax
wicker willow wool zinc
""".split()

THINGS = """
accident account advice afternoon agreement answer anthem argument arrival ballad bargain battle beginning birthday
blessing bonfire breakfast breeze burden carnival ceremony chance change chapter choice chorus climate cloud comedy
command compromise concert contest conversation custom danger darkness dawn debt decision defeat delay delight departure
detail diary dinner discovery dispute distance dream drought duty dusk earthquake echo eclipse effort election errand
evening examination excuse expedition experiment explanation failure farewell fashion feast fever flood fog fortune
friendship frost future game glimpse gossip hail harvest holiday honour hope horizon hour hurricane idea illness
instruction invention invitation jest journey joy kindness knowledge laughter law legend lesson lightning luck luncheon
march marriage measure medicine melody memory message midnight miracle mist mistake moment month moonlight morning
mystery noise noon novel opinion order parade patience pattern payment peace performance permit plan pleasure poem
pride prize problem promise proof proverb puzzle quarrel question race rain rainbow reason recipe rehearsal remedy
remark report rescue reward rhyme riddle rumour sadness scandal scheme search season secret sermon shadow shower signal
silence sketch sleep smoke snow solution song sorrow sound speech storm story strategy strike success sunrise sunset
surprise tale tempest thought thunder tide title toast tradition treaty trial trick triumph trouble truce truth twilight
vacation verdict victory vision voyage wager war warning weather wedding week whisper wind winter wisdom wish word year
""".split()

TRANSITIVE = """
abandoned accepted admired adjusted announced approached arranged assembled avoided balanced blamed borrowed bought
brought built buried burned carried carved caught celebrated changed chased checked chose cleaned climbed closed
collected compared completed concealed considered copied counted covered crossed decorated defended delivered described
designed despised discussed divided dragged drew dropped dusted earned emptied enjoyed entered envied escorted examined
exchanged exhibited explained explored feared fetched filled finished fixed folded followed forgave forgot found framed
gathered gave greeted guarded guided handled hated heard helped hid hired hoisted honoured hung ignored imagined
imitated improved inherited inspected insulted invented invited joined judged kept kicked knew labelled launched learned
left lent lifted liked lit loaded locked lost loved lowered made managed marked measured melted mended mentioned missed
mistook mixed moved named needed noticed observed obtained offered opened ordered owned packed painted paid passed
photographed picked placed planned planted played pleased plucked polished poured praised prepared preserved presented
printed promised protected pulled purchased pushed raised ransomed reached recalled received recognised recorded
refused remembered removed rented repaired replaced requested rescued restored returned reviewed rewarded rolled ruined
saved scraped searched seized selected sent served shaped shared sharpened showed sketched sold solved spoiled spotted
stacked started stitched stole stored studied supplied supported surprised surrounded swapped swept tasted taught tested
thanked threw tied touched traced traded trained translated transported treasured tried trusted turned unloaded used
valued visited wanted warmed warned washed watched weighed welcomed wiped won wore wrapped wrote
""".split()

INTRANSITIVE = """
appeared arrived ascended awoke begged bowed breathed broke camped coughed cried crouched danced descended dined
disappeared dozed dreamed drifted fainted fell fled floated flourished frowned gazed giggled glanced glided glowed
groaned grumbled halted hesitated hummed hurried jumped knelt knocked lamented laughed leaned leapt lingered listened
marched meditated mumbled murmured nodded objected paced paused perished prayed prospered protested quarrelled rambled
recovered relaxed replied rested retired roamed rose sailed sang sat scowled shivered shouted shrugged sighed skipped
slept slipped smiled sneezed sobbed spoke sprinted stammered stood strolled struggled stumbled succeeded surrendered
swam swore talked travelled trembled trotted vanished waded waited walked wandered wavered wept whistled winked
withdrew worked worried yawned yelled
""".split()

ADJECTIVES = """
able absent ancient angry anxious awkward bald bare bashful beautiful bitter bleak blind blunt bold brave bright brisk
brittle broad broken busy calm careful careless cautious charming cheap cheerful chilly civil clean clear clever clumsy
coarse cold comfortable common complete cool costly courteous cracked crooked crowded cruel curious damp dangerous
daring dark dear decent deep delicate dense dim dirty distant distinguished dreadful dreary dry dull dusty eager early
eccentric elderly elegant eloquent empty enormous equal excellent exotic faded faint fair faithful false familiar famous
fearless feeble fertile fierce fine firm flat foolish foreign forgotten formal fragile fragrant frank free fresh
friendly frozen frugal full funny furious generous gentle genuine ghostly giant glad gloomy glorious golden good
graceful grand grateful grave greedy grim handsome happy hard harmless harsh hasty haughty heavy helpful hidden high
hollow holy honest hopeful hot huge humble hungry idle immense important impatient industrious innocent invisible
jealous jolly joyful keen kind lame large late lazy lean light lively local lofty lonely long loose loud lovely low
loyal lucky magnificent massive mellow merry mighty mild miserable modern modest muddy mute mysterious naked narrow
nasty natural neat nervous new nimble noble noisy normal obedient odd old open ordinary ornate pale patient peaceful
peculiar perfect plain playful pleasant plump polite poor popular precious pretty private proud prudent punctual pure
quaint quick quiet radiant ragged rapid rare raw ready real reckless remote restless rich ripe robust rough round royal
rude rural rusty sacred sad safe scarce secure selfish serious severe shabby shady shallow sharp shiny short shy sick
silent simple sincere sleepy slender slim slippery slow small smart smooth sober soft solemn solid solitary sour spare
splendid square stale steady steep stern sticky stiff stout strange strict strong stubborn sturdy subtle sudden sullen
sunny superb sweet swollen tall tame tart tender tense thick thin thirsty thorough tidy tight timid tiny tired tough
tranquil trusty ugly unusual upright upset urban useful useless vacant vague vain valiant vast vivid warm wary weak
wealthy weary weird wet whole wicked wide wild wise witty wonderful wooden worthy wounded young zealous
""".split()

COLOURS = """
azure beige black blue brown cream crimson emerald green grey indigo ivory lavender lilac magenta maroon mauve ochre
orange pink purple red rose ruby russet scarlet turquoise violet white yellow
""".split()

ADVERBS = """
abruptly almost always angrily anxiously ardently badly blindly boldly bravely briefly brightly busily calmly carefully
casually certainly cheerfully clearly cleverly closely coldly constantly curiously daily deeply deliberately eagerly
easily elegantly eventually exactly faithfully fiercely finally firmly fondly frankly freely frequently gently gladly
gracefully gradually gravely happily hastily heavily honestly hopefully hungrily idly instantly joyfully kindly lazily
loudly madly mildly modestly nearly neatly nervously never nicely noisily often openly painfully partly patiently
perfectly politely poorly promptly proudly quickly quietly rarely readily recently reluctantly repeatedly rudely sadly
safely secretly seldom seriously sharply shortly shyly silently simply sincerely slowly smoothly softly solemnly
sometimes soon steadily sternly strangely suddenly swiftly tenderly thoughtfully tightly usually vainly warmly weakly
wearily wildly willingly wisely
""".split()

FIRST_NAMES = """
Ada Agnes Albert Alice Alma Amos Anna Anton Arthur Astrid Aubrey Bertha Boris Bruno Cecil Celia Clara Clement Conrad
Cora Cyril Daphne David Delia Dora Edgar Edith Edmund Elias Elsa Emil Enid Ernest Esther Eugene Evelyn Felix Flora
Frances Frank Freda Gerald Gilbert Gladys Godfrey Greta Gustav Hannah Harold Harriet Hector Helen Henry Hester Hilda
Horace Hugo Ida Ingrid Irene Iris Isaac Ivan Ivy Jacob Jasper Jessie Joan Joel Josef Judith Julia Karl Kate Laura
Lena Leo Leonard Lewis Lilian Linus Lucy Luther Mabel Magnus Margot Martha Martin Matilda Maud Maurice Max Mildred
Miriam Morris Muriel Myra Nadia Nathan Nell Nina Nora Norman Olga Oliver Olive Oscar Otto Owen Paul Pearl Percy Peter
Philip Phoebe Ralph Raymond Rhoda Robert Roland Rosa Rufus Rupert Ruth Sabina Samuel Silas Simon Sonia Stella Stephen
Susan Sybil Sylvia Theodore Thomas Ursula Vera Victor Viola Walter Wanda Warren Wilfred Willa Winston Yvonne Zelda
""".split()

SYLLABLES = """
ba be bi bo bu da de di do du fa fe fi fo ga ge gi go gu ha he hi ho ka ke ki ko ku la le li lo lu ma me mi mo mu na ne
ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi wo za ze zo
""".split()

TOWN_STARTS = """
Ald Arn Ash Bar Bel Bram Bren Cal Car Clay Col Crow Dal Dun East Eld Fal Fen Gar Glen Gran Hal Haw Hazel Hol Kel Kirk
Lang Lin Lor Mar Mel Mil Mor Nor Oak Old Pen Pol Quin Red Ros Row Sal Sand Sel Shel Stan Sul Tam Thorn Tor Ul Wal War
Wes Whit Win Wol Wy Yar
""".split()

TOWN_ENDS = """
bank borough bridge brook bury by cliff combe cote dale den field ford gate grove ham haven hill holm hurst ley low
marsh mere minster moor mouth ness port ridge shaw stead stoke stone thorpe ton wick wold wood worth
""".split()

#: all words from which the prose is generated
WORDS = frozenset(
    PEOPLE
    + ANIMALS
    + FOODS
    + TOOLS
    + PLACES
    + MATERIALS
    + THINGS
    + TRANSITIVE
    + INTRANSITIVE
    + ADJECTIVES
    + COLOURS
    + ADVERBS
    + FIRST_NAMES
)


def distinct(n: int, make: Callable[[], str]) -> list[str]:
    """Draw random names until `n` different ones have occurred, and return these, in the order of their first draw.

    If `make` cannot return `n` different ones, this never returns.
    """
    names: dict[str, None] = {}
    while len(names) < n:
        names[make()] = None
    return list(names)


def digits(rng: Rng, n: int) -> str:
    """Return a random string of `n` decimal digits, the first of which is not 0."""
    return str(rng.between(10 ** (n - 1), 10**n - 1))


def hexadecimal(rng: Rng, n: int) -> str:
    """Return a random string of `n` hexadecimal digits; `n` is at most 16."""
    return f"{rng.bits():016x}"[:n]


def random_key(rng: Rng) -> str:
    """Return a random adjective and noun joined by a hyphen, for example ``rusty-lantern``."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(TOOLS)}"


def random_pair(rng: Rng) -> str:
    """Return two random words, a colour and an animal or a tool, for example ``amber falcon``."""
    return f"{rng.choice(COLOURS)} {rng.choice(ANIMALS + TOOLS)}"


def label(rng: Rng) -> str:
    """Return a random made-up word, for example ``zuvake``."""
    return "".join(rng.choice(SYLLABLES) for _ in range(3))


def town(rng: Rng) -> str:
    """Return a random made-up name of a town, for example ``Fenmouth``."""
    return rng.choice(TOWN_STARTS) + rng.choice(TOWN_ENDS)


def person(rng: Rng) -> str:
    """Return a random full name, a real first name with a made-up surname, for example ``Clara Holbrook``."""
    return f"{rng.choice(FIRST_NAMES)} {town(rng)}"


def variable(rng: Rng) -> str:
    """Return a random variable name of three capital letters, for example ``QXB``."""
    return "".join(chr(65 + rng.below(26)) for _ in range(3))
